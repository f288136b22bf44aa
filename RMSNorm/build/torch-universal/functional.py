"""RMS norms as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.arguments import check_tensors
from ._common.cann import CANN
from ._common.derivatives import gradients, is_transformed, needs_grad
from ._common.distributed import is_distributed
from ._common.second_order import let_differentiate

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# op-plugin 7.1.0, of CANN 8.2, torch_npu-npu_rms_norm.md: gamma is in the dtype of self; 7.2.0 has pairs with float32
_WEIGHT_IN_FLOAT32 = CANN >= (8, 3)
_FLOAT32_EPS = torch.finfo(torch.float32).eps  # in which torch's rms_norm computes what is narrower


def rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Compute ``hidden_states / sqrt(mean(hidden_states², -1) + eps) * weight`` in float32, rounded once.

    That is LlamaRMSNorm.forward of transformers, models/llama/modeling_llama.py, without its rounding in between. It is
    one launch of ``npu_rms_norm`` for float16, bfloat16 and float32 with 2 to 8 dimensions on the NPU, a weight of the
    same dtype or float32; the same formula in torch for everything else, and under torch.func and forward-mode
    derivatives. CANN 8.2 has it in one dtype alone: other pairs are normed in float32 there, between two casts.
    Differentiable as often as torch's own operators are.

    Args:
        hidden_states: ``[..., H]``, of a floating dtype.
        weight: ``[H]``, of a floating dtype, or None for a norm without one.
        eps: added to the mean; 0.0 is legal, and None is what torch's own rms_norm takes then: that of float32.

    Returns:
        ``[..., H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: ``weight`` is not ``[H]``, or on another device.
        TypeError: ``hidden_states`` or ``weight`` is not floating point.
    """
    _check(hidden_states, weight)
    return unchecked_rms_norm(hidden_states, weight, eps)


def unchecked_rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Compute :func:`rms_norm` of arguments that fit, as those of a module do: nothing is checked."""
    if eps is None:
        eps = _FLOAT32_EPS
    if not is_rms_norm_fused(hidden_states, weight):
        if weight is not None and weight.dtype in _FUSED_DTYPES:
            weight = weight.float()  # exact, and legal beside every dtype
        if not is_rms_norm_fused(hidden_states, weight):
            return _rms_norm_reference(hidden_states, weight, eps)
    if weight is None:
        weight = hidden_states.new_ones(hidden_states.shape[-1])
    if not _WEIGHT_IN_FLOAT32 and weight.dtype is not hidden_states.dtype:
        return unchecked_rms_norm(hidden_states.float(), weight, eps).to(hidden_states.dtype)
    # the device gives a contiguous gradient, the meta kernel one that lies as hidden_states: graphs trust the latter
    if not hidden_states.is_contiguous() and torch.compiler.is_compiling() and needs_grad(hidden_states, weight):
        hidden_states = hidden_states.contiguous()
    return torch.ops.npu.npu_rms_norm(hidden_states, weight, eps)[0]


def zero_centered_rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute :func:`rms_norm` with the weight ``1 + weight``, the sum in float32.

    That is GemmaRMSNorm.forward of transformers, models/gemma/modeling_gemma.py. Where no gradient is needed it is one
    launch of ``npu_gemma_rms_norm``, for contiguous tensors of one dtype; otherwise the sum, and what rms_norm does.

    Args:
        hidden_states: ``[..., H]``, of a floating dtype.
        weight: ``[H]``, of a floating dtype.
        eps: added to the mean.

    Returns:
        ``[..., H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: ``weight`` is not ``[H]``, or on another device.
        TypeError: ``hidden_states`` or ``weight`` is not floating point.
    """
    _check(hidden_states, weight)
    return unchecked_zero_centered_rms_norm(hidden_states, weight, eps)


def unchecked_zero_centered_rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute :func:`zero_centered_rms_norm` of arguments that fit: nothing is checked.

    ``npu_gemma_rms_norm`` adds in float32 and rounds once, in every dtype: CANN's ops-nn, norm/rms_norm/op_kernel,
    rms_norm.h. It has no derivative, and says nothing of it; DTensors have no rule for it.
    """
    if (
        weight.dtype is hidden_states.dtype
        and not (torch.is_grad_enabled() and needs_grad(hidden_states, weight))  # one call less
        and is_rms_norm_fused(hidden_states, weight)
        and hidden_states.is_contiguous()
        and weight.is_contiguous()
        and not is_distributed(hidden_states, weight)
    ):
        return torch.ops.npu.npu_gemma_rms_norm(hidden_states, weight, eps)[0]
    return unchecked_rms_norm(hidden_states, 1.0 + weight.float(), eps)


def add_rms_norm(hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """Compute the norm of ``hidden_states + residual``, and the sum.

    It is one launch of ``npu_add_rms_norm`` where no gradient is needed; it rounds twice, to the sum's dtype before it
    multiplies with the weight. With gradients an addition and a norm, since the operator has no derivative.

    Args:
        hidden_states: ``[..., H]``, of a floating dtype.
        residual: ``[..., H]``, of the same shape.
        weight: ``[H]``, of a floating dtype.
        eps: added to the mean; None as in :func:`rms_norm`.

    Returns:
        The norm and the sum, ``[..., H]`` each, in the dtype that the sum has.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: an argument is not floating point.
    """
    _check(hidden_states, weight, residual)
    if residual.shape != hidden_states.shape:
        raise ValueError(
            f"add_rms_norm: residual {list(residual.shape)} must have the shape of hidden_states "
            f"{list(hidden_states.shape)}"
        )
    if is_add_rms_norm_fused(hidden_states, residual, weight) and not needs_grad(hidden_states, residual, weight):
        eps = _FLOAT32_EPS if eps is None else eps
        normed, _, total = torch.ops.npu.npu_add_rms_norm(hidden_states, residual, weight, eps)
        return normed, total
    total = hidden_states + residual
    return unchecked_rms_norm(total, weight, eps), total


def is_rms_norm_fused(hidden_states: Tensor, weight: Tensor | None) -> bool:
    """Tell whether ``npu_rms_norm`` takes them (Atlas A2 and A3): op-plugin, docs/zh/custom_APIs/torch_npu.

    Nothing empty: CANN's ops-nn, norm/rms_norm/op_host, rms_norm_tiling.cpp, "Input x shape can not be 0".
    """
    dtype, shape = hidden_states.dtype, hidden_states.shape
    return (
        hidden_states.device.type == "npu"
        and dtype in _FUSED_DTYPES
        and 0 not in shape
        and bool(shape[1:])
        and not shape[8:]  # 2 to 8 dimensions, without a call that every forward would make
        and (weight is None or (weight.dtype in (dtype, torch.float32) and weight.shape == shape[-1:]))
        and not is_transformed()
    )


def is_add_rms_norm_fused(hidden_states: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Tell whether ``npu_add_rms_norm`` takes them: it wants one dtype."""
    return hidden_states.dtype == residual.dtype == weight.dtype and is_rms_norm_fused(hidden_states, weight)


def _rms_norm_reference(hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute the same formula in torch, for what the operator does not take."""
    x = hidden_states.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x if weight is None else x * weight.float()).to(hidden_states.dtype)


def register_second_derivative() -> None:
    """Let the gradient of ``npu_rms_norm`` be differentiated, where torch_npu is there."""
    if hasattr(torch.ops.npu, "npu_rms_norm_backward"):
        let_differentiate(torch.ops.npu.npu_rms_norm_backward.default, 0, _gradient_reference)


def _gradient_reference(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    """Compute what ``npu_rms_norm_backward`` does, from the reciprocal root ``rstd`` that the forward found."""
    dims = tuple(range(-weight.dim(), 0))

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        mean = x.square().mean(dims, keepdim=True)
        eps = (rstd.square().reciprocal() - mean).detach()
        return x * torch.rsqrt(mean + eps) * weight.float()

    return tuple(gradients(normed, (x, weight), (True, True), grad))  # type: ignore[arg-type]


def _check(hidden_states: Tensor, weight: Tensor | None, residual: Tensor | None = None) -> None:
    """Raise what the functions here say of arguments that do not fit."""
    check_tensors(hidden_states=hidden_states, residual=residual, weight=weight)
    if weight is not None and weight.shape != hidden_states.shape[-1:]:
        raise ValueError(
            f"weight {list(weight.shape)} must have the size of the last dimension of hidden_states "
            f"{list(hidden_states.shape)}"
        )
