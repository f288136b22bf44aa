"""Whether the gradient of an MLP's unit can be that of an operator: how many bytes its halves have decides."""

from __future__ import annotations

from torch import nn

from .activations import activation_to_call
from .functional import is_aligned
from .operators import SWIGLU
from .packing import MLP_PROJECTIONS, TWO_PROJECTIONS, projections

__all__ = ["unaligned"]


def unaligned(mlp: nn.Module) -> str | None:
    """Say why an MLP with SiLU is computed in torch where it is trained; None if it is not.

    Args:
        mlp: has its projections as members.
    """
    weight = projections(mlp, (*MLP_PROJECTIONS, *TWO_PROJECTIONS))[-1]._parameters.get("weight")
    if weight is None or activation_to_call(mlp, SWIGLU) is not None or is_aligned(weight.shape[-1], weight.dtype):
        return None
    size = weight.shape[-1] * weight.dtype.itemsize
    return f"in torch where it is trained, since halves of {size} bytes are no multiple of 64"
