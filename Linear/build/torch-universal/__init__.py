"""Linear layers for Huawei Ascend NPUs: frozen ones with adapters or in few bits, and those of patches of pictures."""

from . import layers
from .adapters import Adapter
from .functional import lora_linear, lora_linears, lora_pair
from .patch_convolution import patch_embedding
from .projections import QuantizedWeight
from .quantised_linear import quantised_linear

__all__ = [
    "Adapter",
    "QuantizedWeight",
    "layers",
    "lora_linear",
    "lora_linears",
    "lora_pair",
    "patch_embedding",
    "quantised_linear",
]
