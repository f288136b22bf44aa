"""Computes torch's own ``rms_norm`` as one operator on the NPU, in any model or function, while kernels are registered.

``F.rms_norm`` and ``nn.RMSNorm`` call ``aten::_fused_rms_norm`` (torch, aten/src/ATen/native/layer_norm.cpp). torch_npu
2.13 has no kernel for it, so that torch computes a formula of several operators there. Ours is composed, too: autograd,
graphs and DTensors see ``npu_rms_norm``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.patches import Patches

_NAME = "_fused_rms_norm"
_REPOSITORY = "RMSNorm"
_FLOAT32_EPS = torch.finfo(torch.float32).eps  # what torch takes where none is given, for what it computes in float32


def install(patches: Patches) -> None:
    """Register the operator until `patches` are undone.

    Do nothing where the kernel was left out, torch has no such operator with a gradient, as before 2.9, or torch_npu
    has a kernel of its own.
    """
    if not (registration.uses(_REPOSITORY) and hasattr(torch.ops.aten, f"{_NAME}_backward")):
        return
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NAME}", "PrivateUse1"):
        return
    library = torch.library.Library("aten", "IMPL")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):  # the NPU, without autograd and with it
        library.impl(_NAME, _rms_norm, key)
    patches.at_the_end(library._destroy)


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, ...]:
    """Compute ``x / sqrt(mean(x²) + eps) * weight`` over the last dimensions, and the reciprocal root."""
    kernel = registration.try_package(_REPOSITORY)
    if kernel is not None and 0 not in x.shape:
        is_last = len(normalized_shape) == 1 and 2 <= x.dim() <= 8
        rows = x if is_last else x.reshape(-1, math.prod(normalized_shape))
        flat_weight = x.new_ones(rows.shape[-1]) if weight is None else weight.reshape(-1)
        if kernel.functional.is_rms_norm_fused(rows, flat_weight):
            if torch.compiler.is_compiling():  # the device gives what is contiguous, the meta kernel what lies as rows
                rows = rows.contiguous()
            normed, rstd = torch.ops.npu.npu_rms_norm(rows, flat_weight, _FLOAT32_EPS if eps is None else eps)
            outer = x.shape[: x.dim() - len(normalized_shape)]
            return normed if is_last else normed.view(x.shape), rstd.view(*outer, *(1 for _ in normalized_shape))
    from torch._decomp import decomposition_table  # what most models never need

    return decomposition_table[getattr(torch.ops.aten, _NAME).default](x, normalized_shape, weight, eps)
