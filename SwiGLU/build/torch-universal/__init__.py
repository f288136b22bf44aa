"""Gated linear units for Huawei Ascend NPUs: SwiGLU, GeGLU, and gpt-oss's clipped SwiGLU."""

from . import layers, packing
from .functional import clamped_swiglu, clipped_swiglu, geglu, swiglu
from .operators import register_derivative_of_swiglu

__all__ = ["clamped_swiglu", "clipped_swiglu", "geglu", "layers", "packing", "swiglu"]

register_derivative_of_swiglu()
