"""Computes torch's own ``grouped_mm`` by the kernel, in any code, while kernels are registered.

Mixtures of experts call it whose weights are one tensor, such as torchtitan's and torchtune's. torch_npu 2.13 has no
kernel for it: torch waits for the sizes of the groups, and multiplies one after the other (ATen,
native/GroupedMMUtils.h).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.patches import Patches

_NAME = "_grouped_mm"
_REPOSITORY = "FusedMoE"
# from torch 2.9 on, which gives what a kernel replaces
IS_REPLACED = hasattr(torch.library, "get_kernel") and hasattr(torch.ops.aten, _NAME)
_KINDS = (Tensor, nn.Parameter, FakeTensor)  # of tensors that lie on one device, or would


def install(patches: Patches) -> None:
    """Put ours in front of the operator until `patches` are undone.

    Do nothing where the kernel was left out, torch has no such operator, or torch_npu has a kernel of its own.
    """
    if not (IS_REPLACED and registration.uses(_REPOSITORY)):
        return
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NAME}", "PrivateUse1"):
        return
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):  # the NPU, with autograd and without
        torchs = torch.library.get_kernel(f"aten::{_NAME}", key).call_boxed
        library.impl(_NAME, functools.partial(_multiply, torchs), key, with_keyset=True)
    patches.at_the_end(library._destroy)


def _multiply(
    torchs: Callable[..., Tensor],
    keys: Any,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply rows with the matrix of their group, ``[M, K]`` and ``[E, K, N]``, or sum each group's: ``[K, M]`` and
    ``[M, N]``. ``offs`` are the ends of the groups, int32 ``[E]``."""
    kernel = registration.try_package(_REPOSITORY) if _fits(left, right, offs, bias, out_dtype) else None
    if kernel is not None and not kernel._common.derivatives.is_transformed():
        assert offs is not None
        gmm, is_sum = kernel.ops.gmm, right.dim() == 2
        if gmm.fits_sizes(left, len(offs), left.shape[0], right.shape[1]) if is_sum else gmm.fits(left, right):
            counts = torch.nn.functional.pad(offs, (1, 0)).diff().long()
            return gmm.sum_over_rows(left.mT, right, counts) if is_sum else kernel.grouped_matmul(left, right, counts)
    return torchs(keys, left, right, offs, bias, out_dtype)


def _fits(left: Tensor, right: Tensor, offs: Tensor | None, bias: Tensor | None, dtype: torch.dtype | None) -> bool:
    """Tell whether the kernel computes what torch does of such arguments; for others torch's errors are raised."""
    if offs is None or bias is not None or dtype not in (None, left.dtype) or torch.compiler.is_compiling():
        return False
    if any(type(each) not in _KINDS or each.device != left.device for each in (left, right, offs)):
        return False
    if left.dtype is not right.dtype or offs.dtype is not torch.int32 or offs.dim() != 1:
        return False
    if left.dim() != 2 or left.shape[1] != right.shape[-2]:
        return False
    if right.dim() == 3:
        return len(offs) == len(right)
    # the sum is what a gradient is computed by: it has none
    return right.dim() == 2 and not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
