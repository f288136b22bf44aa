"""Mixtures of experts for Huawei Ascend NPUs: experts of transformers in grouped products, with gradients."""

from . import blocks, gates, layers
from .experts_interface import experts_forward
from .functional import fused_experts, grouped_matmul
from .gates import SWIGLU, Gate
from .gating import gating_top_k
from .grouped_products import GmmFunction
from .listed_products import HybridGmmFunction
from .router import softmax_top_k

__all__ = [
    "SWIGLU",
    "Gate",
    "GmmFunction",
    "HybridGmmFunction",
    "blocks",
    "experts_forward",
    "fused_experts",
    "gates",
    "gating_top_k",
    "grouped_matmul",
    "layers",
    "softmax_top_k",
]
