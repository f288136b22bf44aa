"""Mixtures of experts for Huawei Ascend NPUs: experts of transformers in grouped products, with gradients."""

from . import expert_activation, layers
from .expert_activation import SWIGLU, Gate
from .expert_layers import experts_forward
from .experts import expert_lists
from .functional import fused_experts, grouped_matmul
from .ops.gmm import GmmFunction
from .ops.hybrid_gmm import HybridGmmFunction
from .routers.grouped_topk import gating_top_k
from .routers.router_product import float32_logits
from .routers.softmax_topk import softmax_top_k

__all__ = [
    "SWIGLU",
    "Gate",
    "GmmFunction",
    "HybridGmmFunction",
    "expert_activation",
    "expert_lists",
    "experts_forward",
    "float32_logits",
    "fused_experts",
    "gating_top_k",
    "grouped_matmul",
    "layers",
    "softmax_top_k",
]
