"""Gated linear units for Huawei Ascend NPUs: SwiGLU, GeGLU, and gpt-oss's clipped SwiGLU."""

from . import alignment, layers, packing
from .functional import clamped_swiglu, clipped_swiglu, geglu, swiglu
from .operators import register_derivative_of_swiglu

__all__ = ["alignment", "clamped_swiglu", "clipped_swiglu", "geglu", "layers", "packing", "swiglu"]

register_derivative_of_swiglu()
