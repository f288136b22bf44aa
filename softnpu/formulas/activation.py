"""Define activations: SiLU, GELU and its product with a gate, and the fast GELU, ``x · sigmoid(1.702 · x)``.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu. Formulas of the gradients: CANN's ops-nn,
activation/*_grad/docs. Rounding is inferred: float32 inside, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, float16, float32
from torch.nn import functional as F

from softnpu import graph_capture
from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.cann import require_before
from softnpu.formulas import formula

SLOPE = 1.702
MOST_ROWS, LONGEST_ROW = 200000, 1024  # of npu_gelu_mul


@formula
def npu_silu(input: Tensor) -> Tensor:
    """Compute ``x · sigmoid(x)``, for float16 and float32 only."""
    require_dtypes("npu_silu", {(float16,), (float32,)}, input=input)
    return _contiguous(input.float() * torch.sigmoid(input.float()), input)


@formula
def npu_silu_(input: Tensor) -> Tensor:
    """Compute npu_silu in place."""
    require_dtypes("npu_silu_", {(float16,), (float32,)}, input=input)
    return input.copy_(input.float() * torch.sigmoid(input.float()))


@formula
def npu_silu_backward(grad_output: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    """Compute ``dy · (s + y · (1 - s))`` with ``s = sigmoid(x)``; x0 is x and x1 is y."""
    operator = "npu_silu_backward"
    require_dtypes(operator, {(d,) * 3 for d in (float16, float32)}, grad_output=grad_output, x0=x0, x1=x1)
    _require_same(operator, grad_output, x0)
    s = torch.sigmoid(x0.float())
    return _contiguous(grad_output.float() * (s + x1.float() * (1 - s)), grad_output)


@formula
def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute ``x · Φ(x)``, or its form with tanh."""
    _require_approximate("npu_gelu", approximate, input)
    return _contiguous(F.gelu(input.float(), approximate=approximate), input)


@formula
def npu_gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:
    operator = "npu_gelu_backward"
    _require_approximate(operator, approximate, grad_output)
    require_dtypes(operator, {(d, d) for d in FLOATING}, grad_output=grad_output, input=input)
    grad, x = torch.broadcast_tensors(grad_output.float(), input.float())
    return _contiguous(torch.ops.aten.gelu_backward(grad, x, approximate=approximate), grad_output)


@formula
def npu_gelu_mul(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute ``gelu(x1) · x2`` for the halves of the last dimension."""
    operator = "npu_gelu_mul"
    _require_approximate(operator, approximate, input)
    fits = 2 <= input.dim() <= 8 and input.shape[-1] % 2 == 0 and input.shape[-1] <= LONGEST_ROW
    rule = f"input must have 2 to 8 dimensions, the last even and at most {LONGEST_ROW}, got {describe(input)}"
    require(fits, operator, rule)
    rows = input.shape[:-1].numel()
    require(rows <= MOST_ROWS, operator, f"input must have at most {MOST_ROWS} rows, got {rows}")
    a, b = input.float().chunk(2, -1)
    return _contiguous(F.gelu(a, approximate=approximate) * b, input)


@formula
def npu_fast_gelu(input: Tensor) -> Tensor:
    """Compute ``x / (1 + exp(-1.702 · x))``."""
    return _fast_gelu("npu_fast_gelu", input)


@formula
def fast_gelu(input: Tensor) -> Tensor:
    """Compute npu_fast_gelu by its older name."""
    return _fast_gelu("fast_gelu", input)


@formula
def npu_fast_gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Compute ``dy · s · (1 + 1.702 · x · (1 - s))`` with ``s = sigmoid(1.702 · x)``."""
    operator = "npu_fast_gelu_backward"
    _refuse_capture(operator, "FastGeluGrad")
    require_dtypes(operator, {(d, d) for d in FLOATING}, grad=grad, input=input)
    _require_same(operator, grad, input)
    x = input.float()
    s = torch.sigmoid(SLOPE * x)
    return _contiguous(grad.float() * s * (1 + SLOPE * x * (1 - s)), input)


def _fast_gelu(operator: str, x: Tensor) -> Tensor:
    _refuse_capture(operator, "FastGelu")
    _require_dims(operator, x)
    return _contiguous(x.float() * torch.sigmoid(SLOPE * x.float()), x)


def _refuse_capture(operator: str, aclop: str) -> None:
    """Refuse an operator of the old interface while a graph is captured.

    op-plugin 7.1.0 and 7.2.0, op_plugin_functions.yaml; Ascend/pytorch, torch_npu/csrc/core/npu/NPUGraphsUtils.h.
    """
    rule = f"Cannot run aclop operators during NPU graph capture. Current working aclop is {aclop}"
    require_before((8, 5), not graph_capture.captured or graph_capture.current() is None, operator, rule)


def _contiguous(result: Tensor, like: Tensor) -> Tensor:
    return result.to(like.dtype).contiguous()


def _require_dims(operator: str, x: Tensor) -> None:
    require_dtypes(operator, {(d,) for d in FLOATING}, input=x)
    require(x.dim() <= 8, operator, f"input must have at most 8 dimensions, got {describe(x)}")


def _require_approximate(operator: str, approximate: Any, x: Tensor) -> None:
    _require_dims(operator, x)
    require(approximate in ("none", "tanh"), operator, f"approximate must be none or tanh, got {approximate!r}")


def _require_same(operator: str, grad: Tensor, x: Tensor) -> None:
    require(grad.shape == x.shape, operator, f"dy {describe(grad)} and x {describe(x)} differ in shape")


@formula
def npu_mish(input: Tensor) -> Tensor:
    """Compute ``x · tanh(softplus(x))`` in float32, rounded once."""
    require_dtypes("npu_mish", {(d,) for d in FLOATING}, input=input)
    return F.mish(input.float()).to(input.dtype)


@formula
def npu_mish_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Compute the gradient of npu_mish in float32, rounded once."""
    require_dtypes("npu_mish_backward", {(d, d) for d in FLOATING}, grad=grad, input=input)
    return torch.ops.aten.mish_backward(grad.float(), input.float()).to(grad.dtype)
