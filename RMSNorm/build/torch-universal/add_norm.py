"""A sum and the norm of it in one launch, where no gradient is needed and the norm is one of the layers here.

``npu_add_rms_norm`` rounds once more than ``npu_rms_norm``, before it multiplies with the weight, and norms the sum
before it is rounded, at widths above 2,000 in bfloat16. The first is what transformers' norms of the layer ``RMSNorm``
do too; the norms that round last are left alone, but for float32, where both do the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._common.distributed import is_distributed
from ._common.modules import has_hooks
from .functional import add_rms_norm, is_add_rms_norm_fused
from .layers import RMSNorm, RMSNormCastLast, read_eps


def add_then_norm(norm: nn.Module, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``norm(residual + hidden_states)``, and the sum; in one launch where :func:`takes_sum` says so.

    Args:
        norm: a module, which is called where it is not in one launch.
        hidden_states: ``[..., H]``.
        residual: ``[..., H]``.
    """
    if takes_sum(norm, hidden_states, residual):
        return add_rms_norm(hidden_states, residual, norm._parameters["weight"], read_eps(norm))  # type: ignore[arg-type]
    total = residual + hidden_states
    return norm(total), total


def takes_sum(norm: nn.Module, hidden_states: Tensor, residual: Tensor) -> bool:
    """Tell whether a norm has the forward of a layer here, nobody watches it, and one launch gives what it does."""
    forward, weight = norm.__dict__.get("forward"), norm._parameters.get("weight")
    function = getattr(forward, "__func__", None)
    function = getattr(function, "__wrapped__", function)  # somebody may have let a layer look at its class first
    rounds_before_weight = function is RMSNorm.forward or hidden_states.dtype is torch.float32
    return (
        function in (RMSNorm.forward, RMSNormCastLast.forward)
        and forward.__self__ is norm  # type: ignore[union-attr]
        and rounds_before_weight
        and weight is not None
        and not torch.is_grad_enabled()
        and not has_hooks(norm)
        and hidden_states.shape == residual.shape
        and hidden_states.device == residual.device == weight.device
        and not is_distributed(hidden_states, residual, weight)
        and is_add_rms_norm_fused(hidden_states, residual, weight)
    )
