"""Activations for Huawei Ascend NPUs: one launch each, for inference and training."""

from . import layers
from .functional import gelu_tanh, quick_gelu

__all__ = ["gelu_tanh", "layers", "quick_gelu"]
