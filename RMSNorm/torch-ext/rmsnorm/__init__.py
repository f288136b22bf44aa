"""Norms and the residual connections around them for Huawei Ascend NPUs, for inference and training."""

from . import dtensor_rules, layers
from . import functional as functional  # which the integration asks
from .add_norm import add_then_norm, takes_sum
from .functional import add_rms_norm, register_second_derivative, rms_norm, zero_centered_rms_norm
from .hyper_connections import hyper_connection
from .layer_norm import add_layer_norm, layer_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "add_then_norm",
    "hyper_connection",
    "layer_norm",
    "layers",
    "rms_norm",
    "takes_sum",
    "zero_centered_rms_norm",
]

register_second_derivative()
dtensor_rules.register()
