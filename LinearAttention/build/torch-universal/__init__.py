"""Linear attention for Huawei Ascend NPUs: gated delta rules, selective scans, recurrences, causal convolutions."""

from . import layers
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .functional import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from .ssm.linear_recurrence import linear_recurrence
from .ssm.selective_scan import selective_scan_fn

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "layers",
    "linear_recurrence",
    "selective_scan_fn",
]
