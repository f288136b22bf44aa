"""Define the gated linear units: SwiGLU, GeGLU and the clipped SwiGLU of GPT-OSS.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu, and the aclnn pages of CANN's ops-nn,
activation/*/docs. Rounding: activation/*/op_kernel there. Unless said otherwise an operator computes in float32 and
rounds once to the dtype of its input; A and B are the first and the second half of the input along ``dim``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, float16, int64

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.formulas import formula

ALIGNMENT = 64  # bytes, of one half in npu_swiglu_backward
MAX_GROUPS = 8192
ERF, TANH = 0, 1  # approximate


@formula
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Compute ``A · sigmoid(A) · B``. The device takes contiguous, non-empty tensors only."""
    operator = "npu_swiglu"
    require_dtypes(operator, {(d,) for d in FLOATING}, input=input)
    _require_halves(operator, input, dim)
    require(input.numel() > 0, operator, f"input is empty: {describe(input)}")
    require(input.is_contiguous(), operator, f"input must be contiguous, got {_strided(input)}")
    a, b = input.float().chunk(2, dim)
    return (a * torch.sigmoid(a) * b).to(input.dtype)


@formula
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Compute ``dA = g · B · (s + A · s · (1 − s))`` and ``dB = g · A · s``, ``s = sigmoid(A)``, joined along dim.

    The device takes non-empty tensors only, and one half of the input must be a multiple of 64 bytes along dim.
    """
    operator = "npu_swiglu_backward"
    require_dtypes(operator, {(d, d) for d in FLOATING}, grad_output=grad_output, input=input)
    half = _require_halves(operator, input, dim)
    _require_shape(operator, half, input, grad_output=grad_output)
    require(input.numel() > 0, operator, f"input is empty: {describe(input)}")
    size = half[dim] * input.element_size()
    require(
        size % ALIGNMENT == 0,
        operator,
        f"one half along dim {dim} must be a multiple of {ALIGNMENT} bytes, got {half[dim]} elements of "
        f"{input.element_size()} bytes, {size} bytes, for input {describe(input)}",
    )
    a, b = input.float().chunk(2, dim)
    g, s = grad_output.float(), torch.sigmoid(a)
    return torch.cat([g * b * (s + a * s * (1 - s)), g * a * s], dim).to(input.dtype).contiguous()


@formula
def npu_geglu(
    input: Tensor, dim: int = -1, approximate: int = TANH, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ``A · gelu(B)`` and ``gelu(B)``; with activate_left ``gelu(A) · B`` and ``gelu(A)``.

    Only float16 multiplies with the rounded gelu; float32 and bfloat16 multiply before they round.
    """
    operator = "npu_geglu"
    require_dtypes(operator, {(d,) for d in FLOATING}, input=input)
    _require_halves(operator, input, dim)
    _require_approximate(operator, approximate)
    activated, other = _activated(input, dim, activate_left)
    exact = _gelu(activated.float(), approximate)
    gelu = exact.to(input.dtype)
    if input.dtype == float16:
        return other * gelu, gelu
    return (other.float() * exact).to(input.dtype), gelu


@formula
def npu_geglu_grad(
    grad_output: Tensor,
    input: Tensor,
    gelu: Tensor,
    dim: int = -1,
    approximate: int = TANH,
    activate_left: bool = False,
) -> Tensor:
    """Compute ``g · other · gelu'(activated)`` for the activated half, ``g · gelu`` for the other, joined along dim.

    ``gelu`` is the second result of npu_geglu. float16 rounds ``g · other`` before it multiplies.
    """
    operator = "npu_geglu_grad"
    require_dtypes(operator, {(d,) * 3 for d in FLOATING}, grad_output=grad_output, input=input, gelu=gelu)
    half = _require_halves(operator, input, dim)
    _require_shape(operator, half, input, grad_output=grad_output, gelu=gelu)
    _require_approximate(operator, approximate)
    activated, other = _activated(input, dim, activate_left)
    weighted = (grad_output * other).float() if input.dtype == float16 else grad_output.float() * other.float()
    gradients = [(weighted * _gelu_slope(activated.float(), approximate)).to(input.dtype), grad_output * gelu]
    return torch.cat(gradients if activate_left else gradients[::-1], dim).contiguous()


@formula
def npu_clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """Compute ``A · sigmoid(alpha · A) · (B + bias)`` with A at most limit and B within ±limit, over x as rows of all
    that is at and after dim: A and B are the even and odd elements of a row, or its halves.

    With group_index only the first ``sum(group_index)`` rows are computed. The device leaves the others unwritten;
    here they are NaN. It takes contiguous tensors only.
    """
    operator = "npu_clipped_swiglu"
    require_dtypes(operator, {(d,) for d in FLOATING}, x=x)
    half = _require_halves(operator, x, dim)
    require(x.is_contiguous(), operator, f"x must be contiguous, got {_strided(x)}")
    first = dim % x.dim()
    rows = x.view(math.prod(x.shape[:first]), math.prod(x.shape[first:]))
    computed = rows[: _group_rows(operator, group_index)].float()
    a, b = (computed[:, ::2], computed[:, 1::2]) if interleaved else computed.chunk(2, 1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    y = x.new_full((rows.shape[0], rows.shape[1] // 2), math.nan)
    y[: len(computed)] = (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)
    return y.view(half)


def _activated(x: Tensor, dim: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    """Return the half that goes through gelu, and the other."""
    left, right = x.contiguous().chunk(2, dim)
    return (left, right) if activate_left else (right, left)


def _gelu(x: Tensor, approximate: int) -> Tensor:
    if approximate == ERF:
        return F.gelu(x)
    return x * torch.sigmoid(_tanh_argument(x))


def _gelu_slope(x: Tensor, approximate: int) -> Tensor:
    if approximate == ERF:
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    s = torch.sigmoid(_tanh_argument(x))
    return s * (1 + x * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x))


def _tanh_argument(x: Tensor) -> Tensor:
    """Compute the z of ``gelu(x) = x / (1 + exp(−z))``, the tanh form without its cancellation."""
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


def _group_rows(operator: str, group_index: Tensor | None) -> int | None:
    if group_index is None:
        return None
    require(
        group_index.dtype == int64 and group_index.dim() == 1,
        operator,
        f"group_index must be int64 and have 1 dimension, got {describe(group_index)}",
    )
    require(
        group_index.numel() <= MAX_GROUPS,
        operator,
        f"group_index has {group_index.numel()} elements; the device takes at most {MAX_GROUPS}",
    )
    require(group_index.is_contiguous(), operator, f"group_index must be contiguous, got {_strided(group_index)}")
    require_values(bool((group_index >= 0).all()), operator, "group_index has a negative element; they count rows")
    return int(group_index.sum())


def _require_halves(operator: str, x: Tensor, dim: int) -> list[int]:
    """Check that x has two halves along dim, and return the shape of one."""
    require(1 <= x.dim() <= 8, operator, f"the input must have 1 to 8 dimensions, got {describe(x)}")
    require(-x.dim() <= dim < x.dim(), operator, f"dim {dim} is out of range for input {describe(x)}")
    require(x.shape[dim] % 2 == 0, operator, f"the size along dim {dim} must be even, got {describe(x)}")
    half = list(x.shape)
    half[dim] //= 2
    return half


def _require_shape(operator: str, half: list[int], x: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        given = f"got {describe(tensor)} for input {describe(x)}"
        require(list(tensor.shape) == half, operator, f"{name} must have the shape of one half, {half}, {given}")


def _require_approximate(operator: str, approximate: int) -> None:
    require(
        approximate in (ERF, TANH),
        operator,
        f"approximate is {approximate}; the device takes {ERF}, erf, or {TANH}, tanh",
    )


def _strided(tensor: Tensor) -> str:
    return f"{describe(tensor)} with strides {list(tensor.stride())}: call .contiguous() first"
