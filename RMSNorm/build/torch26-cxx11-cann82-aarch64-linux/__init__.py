"""Norms and the residual connections around them for Huawei Ascend NPUs, for inference and training."""

from . import layers, sharding
from .functional import add_rms_norm, register_derivative_of_rms_norm, rms_norm, zero_centered_rms_norm
from .hyper_connections import hyper_connection
from .layer_norm import add_layer_norm, layer_norm
from .residual import add_then_norm, takes_sum

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

register_derivative_of_rms_norm()
sharding.register()
