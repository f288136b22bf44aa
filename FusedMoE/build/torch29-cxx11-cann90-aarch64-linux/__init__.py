"""Mixtures of experts for Huawei Ascend NPUs: experts of transformers in grouped products, with gradients."""

from . import layers, layout
from .experts import experts_forward
from .functional import fused_experts, grouped_matmul
from .gates import SWIGLU, Gate
from .grouped import GmmFunction
from .lists import HybridGmmFunction
from .router import softmax_top_k

__all__ = [
    "SWIGLU",
    "Gate",
    "GmmFunction",
    "HybridGmmFunction",
    "experts_forward",
    "fused_experts",
    "grouped_matmul",
    "layers",
    "layout",
    "softmax_top_k",
]
