"""Define, over CPU tensors, the aten operators that the device has and the CPU has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from softnpu import graph_capture
from softnpu.argument_checks import require
from softnpu.counting import count_wait
from softnpu.host_call import OnHost

FORMULAS: dict[str, Callable] = {}


def formula(*names: str) -> Callable:
    """Register the function below as the host's form of aten operators."""

    def register(function: Callable) -> Callable:
        FORMULAS.update(dict.fromkeys(names, function))
        return function

    return register


@formula("matmul_backward")
def matmul_backward(
    grad: Tensor | None, self: Tensor, other: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of ``torch.matmul``, which torch_npu differentiates as one operator; none without one.

    Where one factor is a matrix and the other a batch, its gradient is one product over rows of all the batch. Where
    both are, it is a product for each of the batch, and what was broadcast autograd sums up.

    Source: op-plugin, MatmulBackwardKernelNpuOpApi.cpp.
    """
    if grad is None:
        return None, None
    left, right = as_matrices(self, other)
    grad = grad.reshape(*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    grad_self = _left_gradient(grad, left, right) if mask[0] else None
    grad_other = _left_gradient(grad.mT, right.mT, left.mT) if mask[1] else None
    return (
        None if grad_self is None else _as_shaped(grad_self, self),
        None if grad_other is None else _as_shaped(grad_other.mT, other),
    )


def _left_gradient(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``grad @ right^H``, for one matrix ``left`` as a single product with the batch beside the columns."""
    if left.shape[:-2].numel() != 1:
        return grad @ right.mH
    columns = grad.movedim(-2, 0).flatten(1)
    return columns @ right.mH.flatten(0, -2)


def _as_shaped(gradient: Tensor, factor: Tensor) -> Tensor:
    """Give a gradient its factor's shape, unless the factor was broadcast."""
    return gradient.reshape(factor.shape) if gradient.numel() == factor.numel() else gradient.contiguous()


def as_matrices(self: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """View the factors of a product as matrices: matmul takes vectors too."""
    return self.unsqueeze(0) if self.dim() == 1 else self, other.unsqueeze(-1) if other.dim() == 1 else other


@formula("histc", "histc.out")
def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: Tensor | None = None) -> Tensor:
    """Count as ``torch.histc`` does, integers too. The counts have the input's dtype: int64 gives int64, int32 int32.

    Sources: op-plugin, HistcKernelNpuOpApi.cpp, and CANN's ops-math, math/histogram_v2. The device takes float16,
    float32, int64, int32, int16, int8 and uint8. It cuts the range of integers to integers and finds their bins in
    integer arithmetic, for which float64 is exact enough. Without a range, min and max equal, op-plugin reads the two
    ends of the data on the host.
    """
    if min == max and self.numel():
        if graph_capture.current() is not None:
            graph_capture.refuse_wait("histc")
        for _ in ("min", "max"):
            count_wait(copies=True)
    if not self.dtype.is_floating_point:
        min, max = int(min), int(max)
    result = torch.histc(self.double(), bins, min, max).to(self.dtype)
    return result if out is None else out.resize_(result.shape).copy_(result)


@formula("_softmax", "_softmax.out")
def softmax(self: Tensor, dim: int, half_to_float: bool, *, out: Tensor | None = None) -> Tensor:
    """Compute the softmax, with ``half_to_float`` of 16-bit numbers in float32."""
    return _to_float32(torch.ops.aten._softmax, self, dim, half_to_float, out)


@formula("_log_softmax", "_log_softmax.out")
def log_softmax(self: Tensor, dim: int, half_to_float: bool, *, out: Tensor | None = None) -> Tensor:
    """Compute the logarithm of the softmax, with ``half_to_float`` of 16-bit numbers in float32."""
    return _to_float32(torch.ops.aten._log_softmax, self, dim, half_to_float, out)


def _to_float32(op: Callable, self: Tensor, dim: int, half_to_float: bool, out: Tensor | None) -> Tensor:
    """Round the result to the input's dtype unless it is to stay in float32, which aclnn takes of any dtype."""
    result = op(self.float() if self.dtype in (torch.float16, torch.bfloat16) else self, dim, False)
    result = result if half_to_float else result.to(self.dtype)
    return result if out is None else out.resize_(result.shape).copy_(result)


@formula("_softmax_backward_data", "_softmax_backward_data.out")
def softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype, *, grad_input: Tensor | None = None
) -> Tensor:
    """Compute the gradient in float32 and round it to the dtype that the softmax was computed of."""
    result = torch.ops.aten._softmax_backward_data(*_in_float32(grad_output, output), dim, torch.float32)
    result = result.to(input_dtype)
    return result if grad_input is None else grad_input.resize_(result.shape).copy_(result)


@formula("_log_softmax_backward_data", "_log_softmax_backward_data.out")
def log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """Compute the gradient in float32, in the dtype of ``grad_output`` as op_plugin_functions.yaml allocates it."""
    result = torch.ops.aten._log_softmax_backward_data(*_in_float32(grad_output, output), dim, torch.float32)
    result = result.to(grad_output.dtype)
    return result if out is None else out.resize_(result.shape).copy_(result)


def _in_float32(*tensors: Tensor) -> list[Tensor]:
    return [t.float() for t in tensors]


@formula("_copy_from_and_resize")
def copy_from_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    """Copy a result into memory that fits it: torch's CPU fallback calls this where torch_npu registers no kernel."""
    return dst.resize_(self.size()).copy_(self)


@formula("_pack_padded_sequence")
def pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, OnHost]:
    """Return ``[T · B, ...]`` rows, time first: the padding up to the longest stays where it is.

    The batch sizes are in the host's memory. Source: op-plugin, PackPaddedSequenceKernelNpuOpApi.cpp.
    """
    _, batch_sizes = torch.ops.aten._pack_padded_sequence(input, lengths, batch_first)
    steps = input.transpose(0, 1) if batch_first else input
    return steps[: len(batch_sizes)].flatten(0, 1), OnHost(batch_sizes)


@formula("put_")
def put_(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write, or add, to what the flattened tensor has at the indices. No bfloat16 is added up (aclnn_put.cpp)."""
    require(
        not (accumulate and self.dtype == torch.bfloat16),
        "put_",
        "self not implemented for DT_BFLOAT16, should be in dtype support list of aclnnInplacePut with accumulate",
    )
    return self.put_(index, source, accumulate)


@formula("mm.dtype", "bmm.dtype")
def product_with_dtype(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply 16-bit matrices to a result in float32."""
    return self.to(out_dtype) @ mat2.to(out_dtype)


@formula("baddbmm.dtype")
def added_batch_product_with_dtype(
    self: Tensor, batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Compute ``baddbmm`` with a dtype of its own for the result."""
    return added_product_with_dtype(self, batch1, batch2, out_dtype, beta=beta, alpha=alpha)


@formula("addmm.dtype")
def added_product_with_dtype(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Compute ``addmm`` with a dtype of its own for the result."""
    return beta * self.to(out_dtype) + alpha * product_with_dtype(mat1, mat2, out_dtype)


@formula("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hy, cy, and for the backward the activated gates in the order input, forget, cell, output."""
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@formula("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the gates, of cx and of the bias."""
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    squashed = cy.tanh()
    d_cy = grad_hy * o * (1 - squashed.square())
    d_cy = d_cy if grad_cy is None else d_cy + grad_cy
    d_i, d_f = d_cy * g * i * (1 - i), d_cy * cx * f * (1 - f)
    d_g, d_o = d_cy * i * (1 - g.square()), grad_hy * squashed * o * (1 - o)
    d_gates = torch.cat([d_i, d_f, d_g, d_o], 1)
    return d_gates, d_cy * f, d_gates.sum(0) if has_bias else d_gates.new_empty(0)
