"""Computes torch's own ``rms_norm`` as one operator on the NPU, in any model or function, while kernels are registered.

``F.rms_norm`` and ``nn.RMSNorm`` call ``aten::_fused_rms_norm`` (torch, aten/src/ATen/native/layer_norm.cpp). torch_npu
2.13 has no kernel for it, so that torch computes a formula of several operators there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels_ext_npu.binding.patches import Patches

_NAME = "_fused_rms_norm"
_KEY = "PrivateUse1"  # torch's dispatch key of the NPU
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # op-plugin, torch_npu-npu_rms_norm.md, of Atlas A2 and A3
# the gradient stays registered: a graph that was recorded before unregister() may end later
_backward: list[torch.library.Library] = []


def install(patches: Patches) -> None:
    """Register the operator until `patches` are undone.

    Do nothing where torch has no such operator with a gradient, as before 2.9, or torch_npu has a kernel of its own.
    """
    if not hasattr(torch.ops.aten, f"{_NAME}_backward"):
        return
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NAME}", _KEY):
        return
    if not _backward:
        _backward.append(torch.library.Library("aten", "IMPL"))
        _backward[0].impl(f"{_NAME}_backward", _rms_norm_backward, _KEY)
    library = torch.library.Library("aten", "IMPL")
    library.impl(_NAME, _rms_norm, _KEY)
    patches.at_the_end(library._destroy)


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, ...]:
    """Compute ``x / sqrt(mean(x²) + eps) * weight`` over the last dimensions, and the reciprocal root."""
    if not _is_fused(x):
        return _formula(_NAME)(x, normalized_shape, weight, eps)
    rows, weight = _rows(x, normalized_shape, weight)
    # eps: what torch takes for float32, in which it computes narrower dtypes
    normed, rstd = torch.ops.npu.npu_rms_norm(rows, weight, torch.finfo(torch.float32).eps if eps is None else eps)
    outer = x.shape[: x.dim() - len(normalized_shape)]
    return normed.view(x.shape), rstd.view(*outer, *(1 for _ in normalized_shape))


def _rms_norm_backward(
    grad: Tensor, x: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of `x` and `weight`, where `mask` asks for them."""
    if not _is_fused(x):
        return _formula(f"{_NAME}_backward")(grad, x, normalized_shape, rstd, weight, mask)
    rows, ones = _rows(x, normalized_shape, weight)
    grads = torch.ops.npu.npu_rms_norm_backward(grad.reshape(rows.shape), rows, ones, rstd.view(*rows.shape[:-1], 1))
    of_weight = grads[1].to(x.dtype).view(normalized_shape) if mask[1] and weight is not None else None
    return grads[0].view(x.shape) if mask[0] else None, of_weight


def _is_fused(x: Tensor) -> bool:
    """Tell whether ``npu_rms_norm`` takes it. The weight is of the same dtype: torch sees to that."""
    return x.dtype in _DTYPES and x.numel() > 0


def _rows(x: Tensor, normalized_shape: list[int], weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `x` with 2 to 8 dimensions, of which the last is normed, and a weight for it."""
    weight = x.new_ones(normalized_shape) if weight is None else weight
    is_taken = len(normalized_shape) == 1 and 2 <= x.dim() <= 8
    return (x, weight) if is_taken else (x.reshape(-1, weight.numel()), weight.reshape(-1))


def _formula(name: str):
    """Return torch's own formula of an operator, for what the NPU's does not take."""
    from torch._decomp import decomposition_table  # what most models never need

    return decomposition_table[getattr(torch.ops.aten, name).default]
