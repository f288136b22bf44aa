"""Gated linear units for Huawei Ascend NPUs: SwiGLU, GeGLU, and gpt-oss's clipped SwiGLU."""

from . import layers, packing
from .functional import clipped_swiglu, geglu, swiglu
from .operators import register_derivative_of_swiglu

__all__ = ["clipped_swiglu", "geglu", "layers", "packing", "swiglu"]

register_derivative_of_swiglu()
