"""Activations as functions of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.cann import CANN
from ._common.captures import capturing
from ._common.derivatives import gradients, is_transformed
from ._common.distributed import is_distributed

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# op-plugin, op_plugin_functions.yaml: npu_fast_gelu has op_api, as graphs want, from 7.3 on, of CANN 8.5. What has none
# they refuse: Ascend/pytorch, torch_npu/csrc/core/npu/NPUGraphsUtils.h, assertNotCapturingAclop.
_IN_GRAPHS = CANN >= (8, 5)
_SLOPE = 1.702  # of npu_fast_gelu: op-plugin, docs/zh/custom_APIs/torch_npu


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³)))``, rounded once: one launch of torch's GELU.

    That is what NewGELUActivation and FastGELUActivation of transformers, activations.py, compute step by step. In
    dtypes that the NPU has no GELU for it is computed so here too. Differentiable as often as torch's own operators.

    Args:
        x: of any shape, of a floating dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        TypeError: x is not floating point.
    """
    _check("gelu_tanh", x)
    if x.device.type == "npu":
        if x.dtype not in _FUSED_DTYPES:
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
        # torch_npu 2.13 makes no GELU that lies so; torch.func does not tell
        if x.dim() == 4 and (is_transformed() or x.is_contiguous(memory_format=torch.channels_last)):
            x = x.contiguous()
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Compute ``x * sigmoid(1.702 * x)``, on the NPU in float32 and rounded once.

    That is QuickGELUActivation of transformers, activations.py, in one launch of ``npu_fast_gelu``; the same formula in
    torch beyond the limits of the operator, under torch.func and for forward-mode derivatives. Differentiable as often
    as torch's own operators are.

    Args:
        x: of any shape, of a floating dtype.

    Returns:
        The shape and dtype of x.

    Raises:
        TypeError: x is not floating point.
    """
    _check("quick_gelu", x)
    if not _is_fused(x):
        return _quick_gelu_in_torch(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _QuickGELU.apply(x)
    return torch.ops.npu.npu_fast_gelu(x)


def _quick_gelu_in_torch(x: Tensor) -> Tensor:
    """Compute the same formula in torch, for what the operator does not take."""
    return x * torch.sigmoid(_SLOPE * x)


class _QuickGELU(torch.autograd.Function):
    """Launches ``npu_fast_gelu``, without a derivative in torch_npu 2.6 and 2.8, and the operator of its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.npu.npu_fast_gelu(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if _refused_in_graphs() or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
            return gradients(lambda x: _quick_gelu_in_torch(x.float()), (x,), (True,), grad)[0]
        return torch.ops.npu.npu_fast_gelu_backward(grad, x)


def _is_fused(x: Tensor) -> bool:
    """Tell whether ``npu_fast_gelu`` takes a tensor (Atlas A2 and A3): op-plugin, docs/zh/custom_APIs/torch_npu."""
    return (
        x.device.type == "npu"
        and x.dtype in _FUSED_DTYPES
        and x.dim() <= 8
        and x.numel() > 0
        and not (is_distributed(x) or is_transformed() or _refused_in_graphs())
    )


def _refused_in_graphs() -> bool:
    """Tell whether a graph is made of what runs, and does not take the operator. What is compiled may be captured."""
    return not _IN_GRAPHS and (torch.compiler.is_compiling() or capturing())


def _check(name: str, x: Tensor) -> None:
    """Raise what the function ``name`` says of an argument that does not fit."""
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must be floating point, got {x.dtype}")
