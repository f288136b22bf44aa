"""Linear layers for Huawei Ascend NPUs: trained ones, several of one input, with low-rank adapters, and of patches."""

from . import layers
from .adapters import Adapter
from .functional import linear, linears, lora_linear, lora_linears, lora_pair
from .patches import patch_embedding

__all__ = [
    "Adapter", "layers", "linear", "linears", "lora_linear", "lora_linears", "lora_pair", "patch_embedding",
]  # fmt: skip
