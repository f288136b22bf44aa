"""The product of a router that compares in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .distributed import is_distributed
from .transforms import is_transformed

_NARROW = (torch.float16, torch.bfloat16)


def float32_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``F.linear(x.float(), weight.float())``, without the casts where nothing needs a gradient.

    The device multiplies float16 and bfloat16 exactly and adds up in float32, so that float32 inputs with the same
    values give no more; ``torch.mm`` with a dtype of its own for the result says so since op-plugin 26.1
    (MmKernelNpuOpApi.cpp). It has no derivative.

    Args:
        x: ``[T, H]``, of a floating dtype.
        weight: ``[E, H]``.

    Returns:
        ``[T, E]``, float32; under autocast in its dtype, as F.linear gives it.
    """
    if _is_fused(x, weight):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def _is_fused(x: Tensor, weight: Tensor) -> bool:
    """Tell whether one product does: of what the device takes, in a release that has it, without a gradient."""
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if trains or x.dtype not in _NARROW or x.dtype is not weight.dtype or x.device.type != "npu" or not x.numel():
        return False
    transformed = is_transformed() or is_distributed(x, weight) or torch.is_autocast_enabled("npu")
    return not transformed and _has_wide_result()


def _has_wide_result() -> bool:
    """Tell whether torch_npu has a kernel for ``mm.dtype``. A compiler cannot look, and casts."""
    if torch.compiler.is_compiling() or not hasattr(torch.ops.aten.mm, "dtype"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "PrivateUse1")
