"""Linear layers whose weight in few bits is multiplied as it lies: nothing of 16 bits is made of it in memory.

``npu_weight_quant_batchmatmul`` takes int8 and int4 beside an input of 16 bits, ``npu_quant_matmul`` int8 beside rows
that ``npu_dynamic_quant`` rounds to int8. Their limits: op-plugin, docs/zh/custom_APIs/torch_npu, and CANN's ops-nn,
matmul/weight_quant_batch_matmul_v2/docs/aclnnWeightQuantBatchMatmulV2.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import is_transformed, needs_grad
from ._common.distributed import is_distributed
from ._common.second_order import differentiable_once
from .projections import flatten_tokens

_LONGEST = 65535
_PACKED = 8  # numbers of four bits in one of int32
_LARGEST = 127


class _Numbers(NamedTuple):
    """A weight in few bits, as :func:`quantised_linear` takes it, and how many columns it has."""

    weight: Tensor
    scale: Tensor
    offset: Tensor | None
    group_size: int
    columns: int

    def dequantised(self) -> Tensor:
        """Make the weight ``[N, H]`` that the numbers stand for, in the dtype of the scale."""
        weight, scale, offset = self[:3]
        if weight.dtype is torch.int32:
            pairs = weight.contiguous().view(torch.uint8)
            numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, : self.columns]
            weight = (numbers ^ 8).to(torch.int8) - 8
        if self.group_size:
            scale = scale.repeat_interleave(self.group_size, 1)[:, : self.columns]
            offset = None if offset is None else offset.repeat_interleave(self.group_size, 1)[:, : self.columns]
        values = weight.to(scale.dtype)
        return (values if offset is None else values + offset) * scale


def quantised_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    group_size: int = 0,
    *,
    offset: Tensor | None = None,
    rounds_input: bool = False,
) -> Tensor:
    """Compute ``x @ ((weight + offset) * scale)ᵀ + bias``, a frozen linear layer whose weight has four or eight bits.

    On the NPU it is one operator, and a second one that rounds the input where that is asked for. A number of the
    weight times its scale is rounded to the dtype of ``x``. The gradient of ``x`` is that of the layer with the weight
    that the numbers stand for, and passes the rounding of the input as it is; for it the weight is made in the
    backward, and not kept. What the operators do not take is the same formula in torch: float32, groups that are no
    multiple of 32, groups or offsets beside an input that is rounded, nothing at all, DTensors, torch.func, and
    gradients under ``torch.compile``.

    Args:
        x: ``[..., H]``, of a floating dtype.
        weight: int8 ``[N, H]``; or int32 ``[N, ceil(H / 8)]``, each of eight signed numbers, the lowest bits first.
        scale: ``[N, 1]``; or ``[N, ceil(H / group_size)]``. The operators take the dtype of ``x``.
        bias: ``[N]`` or None.
        group_size: how many neighbours of a row share a scale; 0 for all of them.
        offset: what is added to numbers before they are scaled, a zero point with a minus; of the shape and dtype of
            ``scale``, or None.
        rounds_input: whether each row of ``x`` is rounded to int8, so that its largest is 127.

    Returns:
        ``[..., N]``, of the dtype of ``x``, or of autocast.

    Raises:
        TypeError: ``x`` is not floating point, or the weight neither int8 nor int32.
    """
    if not x.is_floating_point() or weight.dtype not in (torch.int8, torch.int32):
        raise TypeError(f"quantised_linear: x must be floating point and weight int8 or int32, got {x.dtype} and "
                        f"{weight.dtype}")  # fmt: skip
    if x.device.type == "npu" and torch.is_autocast_enabled("npu"):
        x = x.to(torch.get_autocast_dtype("npu"))
    numbers = _Numbers(weight, scale, offset, group_size if group_size < x.shape[-1] else 0, x.shape[-1])
    if not _is_fused(x, numbers, rounds_input):
        return _reference(x, numbers, bias, rounds_input)
    if not needs_grad(x, bias):
        return _fused(x, numbers, bias, rounds_input)
    with unseen_by_checkpoints():
        return QuantisedLinear.apply(x, numbers, bias, rounds_input)


class QuantisedLinear(torch.autograd.Function):
    """Computes :func:`quantised_linear` with a gradient for its input."""

    @staticmethod
    def forward(ctx, x: Tensor, numbers: _Numbers, bias: Tensor | None, rounds_input: bool) -> Tensor:
        ctx.save_for_backward(*numbers[:3])
        ctx.layout, ctx.shape = numbers[3:], x.shape
        y = _fused(x, numbers, bias, rounds_input)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    @differentiable_once
    def backward(ctx, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        d_y, (needs_x, _, needs_bias, _) = flatten_tokens(grad), ctx.needs_input_grad
        d_x = (d_y @ _Numbers(*saved, *ctx.layout).dequantised()).view(ctx.shape) if needs_x else None
        return d_x, None, d_y.sum(0) if needs_bias else None, None


def _is_fused(x: Tensor, numbers: _Numbers, rounds_input: bool) -> bool:
    """Tell whether the operators take a layer, and nothing else has to differentiate it."""
    weight, scale, offset, group_size, size = numbers
    if x.device.type != "npu" or x.dtype not in (torch.float16, torch.bfloat16) or x.dtype is not scale.dtype:
        return False
    if not weight.is_contiguous() or x.numel() == 0 or weight.numel() == 0:
        return False
    rows, columns = weight.shape
    if weight.dtype is torch.int32:
        # a matrix of one row or column does not tell which way it lies
        if rounds_input or min(rows, columns) == 1 or size != columns * _PACKED:
            return False
    elif size != columns:
        return False
    if rounds_input and (group_size or offset is not None):
        return False
    if group_size % 32 or max(size, rows) > _LONGEST or is_transformed() or is_distributed(x, weight, scale):
        return False
    return not (torch.compiler.is_compiling() and torch.is_grad_enabled() and x.requires_grad)


def _fused(x: Tensor, numbers: _Numbers, bias: Tensor | None, rounds_input: bool) -> Tensor:
    """Compute a layer that :func:`_is_fused` takes."""
    tokens, turned, scale, offset = flatten_tokens(x), numbers.weight.t(), numbers.scale, numbers.offset
    if rounds_input:
        rounded, steps = torch.ops.npu.npu_dynamic_quant(tokens)
        scale = scale.view(-1) if x.dtype is torch.bfloat16 else scale.view(-1).float()
        bias = bias if bias is None else bias.float()
        y = torch.ops.npu.npu_quant_matmul(
            rounded, turned, scale, pertoken_scale=steps, bias=bias, output_dtype=x.dtype
        )
    else:
        if bias is not None:
            bias = bias.to(torch.float32 if x.dtype is torch.bfloat16 else torch.float16)
        offset = offset if offset is None else offset.t()
        y = torch.ops.npu.npu_weight_quant_batchmatmul(
            tokens, turned, scale.t(), offset, None, None, bias, numbers.group_size
        )
    return y.view(*x.shape[:-1], y.shape[-1])


def _reference(x: Tensor, numbers: _Numbers, bias: Tensor | None, rounds_input: bool) -> Tensor:
    """Compute the same by operators of torch."""
    if rounds_input and x.numel():
        step = x.detach().abs().amax(-1, keepdim=True).float() / _LARGEST
        rounded = (torch.round(x.detach() / step) * step).nan_to_num(0.0).to(x.dtype)  # zeros over zero
        x = rounded + (x - x.detach())
    return F.linear(x, numbers.dequantised().to(x.dtype), None if bias is None else bias.to(x.dtype))
