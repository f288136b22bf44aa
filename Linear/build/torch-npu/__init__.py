"""Linear layers that are trained, for Huawei Ascend NPUs: alone, several of one input, and with low-rank adapters."""

from .adapters import Adapter
from .functional import linear, linears, lora_linear, lora_linears, lora_pair

__all__ = ["Adapter", "linear", "linears", "lora_linear", "lora_linears", "lora_pair"]
