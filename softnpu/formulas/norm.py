"""Define the RMS norm family.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu. Rounding: CANN's ops-nn, norm/*/op_kernel.
Throughout, ``rstd = 1 / sqrt(mean(x²) + epsilon)`` in float32 over the dimensions of gamma, the last ones of x.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, float32

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.cann import require_before
from softnpu.formulas import formula

RMS_NORM_DTYPES: set[tuple[torch.dtype, ...]] = {
    (float16, float32),
    (bfloat16, float32),
    (float16, float16),
    (bfloat16, bfloat16),
    (float32, float32),
}

# On 910B rows up to this length go to the MERGE_N kernels
MERGE_N_COLUMNS = 2000


@formula
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Return ``y = x · rstd · gamma`` in float32, rounded once to the dtype of x; and rstd, float32, keepdim.

    float16 on 910B rounds ``x · rstd`` before it multiplies where rms_norm_whole_reduce_sum.h is taken.
    """
    _require_trailing("npu_rms_norm", input, gamma)
    require_dtypes("npu_rms_norm", RMS_NORM_DTYPES, input=input, gamma=gamma)
    _require_one_dtype("npu_rms_norm", input, gamma)
    x = input.float()
    rstd = _rstd(x, gamma.dim(), epsilon)
    if _whole_reduce_sum(input, gamma):
        return ((x * rstd).half() * gamma).contiguous(), rstd
    return (x * rstd * gamma.float()).to(input.dtype).contiguous(), rstd


@formula
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``dx = rstd · (dy·gamma − x · rstd² · mean(dy·gamma·x))`` in the dtype of x; dgamma in float32."""
    require(dy is not None, "npu_rms_norm_backward", "dy is undefined, and the operator has no second derivative")
    _require_trailing("npu_rms_norm_backward", input, gamma)
    require_dtypes("npu_rms_norm_backward", {(x, x, g) for x, g in RMS_NORM_DTYPES}, dy=dy, input=input, gamma=gamma)
    _require_one_dtype("npu_rms_norm_backward", input, gamma)
    require(
        dy.shape == input.shape, "npu_rms_norm_backward", f"dy {describe(dy)} and x {describe(input)} differ in shape"
    )
    dims = _trailing(gamma.dim())
    x, weighted = input.float(), dy.float() * gamma.float()
    dx = rstd * (weighted - x * rstd * rstd * (weighted * x).mean(dims, keepdim=True))
    dgamma = (dy.float() * x * rstd).sum(tuple(range(input.dim() - gamma.dim())))
    return dx.to(input.dtype).contiguous(), dgamma  # however dy and x lie


@formula
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Return ``y = x · rstd · (1 + gamma)`` in float32, rounded once, and rstd.

    The device takes contiguous, non-empty tensors only.
    """
    operator = "npu_gemma_rms_norm"
    _require_trailing(operator, input, gamma)
    require_dtypes(operator, {(d, d) for d in FLOATING}, input=input, gamma=gamma)
    require(input.numel() > 0, operator, f"x is empty: {describe(input)}")
    require(input.is_contiguous() and gamma.is_contiguous(), operator, "x and gamma must be contiguous")
    x = input.float()
    rstd = _rstd(x, gamma.dim(), epsilon)
    return (x * rstd * (1.0 + gamma.float())).to(input.dtype), rstd


@formula
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of ``x1 + x2``, its rstd, and the sum.

    float16 adds in float16. bfloat16 adds in float32; the MERGE_N kernels norm the rounded sum, the others the exact
    one. Both round ``x · rstd`` before they multiply with gamma.
    """
    y, rstd, total = _add_rms_norm("npu_add_rms_norm", x1, x2, gamma, epsilon)
    return y.contiguous(), rstd, total.contiguous()


@formula
def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm of ``x1 + x2`` as float32 and in the dtype of x1, its rstd, and the sum.

    The float32 result holds the rounded values. float16 adds, and multiplies with gamma, in float16; bfloat16 norms the
    exact sum and rounds once (op_kernel/add_rms_norm_cast.h).
    """
    operator = "npu_add_rms_norm_cast"
    _require_sum(operator, x1, x2, gamma, (float16, bfloat16))
    total = x1.float() + x2.float()
    rounded = total.to(x1.dtype)
    if x1.dtype == float16:
        total = rounded.float()
        rstd = _rstd(total, gamma.dim(), epsilon)
        y = (total * rstd).half() * gamma
    else:
        rstd = _rstd(total, gamma.dim(), epsilon)
        y = (total * rstd * gamma.float()).to(x1.dtype)
    return y.float().contiguous(), y.contiguous(), rstd, rounded.contiguous()


@formula
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> Tensor:
    """Write the result of npu_add_rms_norm to x1 and the sum to x2, and return rstd."""
    y, rstd, total = _add_rms_norm("npu_add_rms_norm_v2", x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


@formula
def npu_add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rstd, the norm and the sum, laid out as x1 and x2, of which the operator makes clones."""
    y, rstd, total = _add_rms_norm("npu_add_rms_norm_v2_functional", x1, x2, gamma, epsilon)
    return rstd, x1.clone().copy_(y), x2.clone().copy_(total)


def _add_rms_norm(
    operator: str, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    _require_sum(operator, x1, x2, gamma, FLOATING)
    total = x1.float() + x2.float()
    rounded = total.to(x1.dtype)
    if x1.dtype == float16 or gamma.numel() <= MERGE_N_COLUMNS:
        total = rounded.float()
    rstd = _rstd(total, gamma.dim(), epsilon)
    normed = (total * rstd).to(x1.dtype)
    return (normed.float() * gamma.float()).to(x1.dtype), rstd, rounded


def _rstd(x: Tensor, gamma_dims: int, epsilon: float) -> Tensor:
    return torch.rsqrt(x.square().mean(_trailing(gamma_dims), keepdim=True) + epsilon)


def _trailing(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def _require_trailing(operator: str, x: Tensor, gamma: Tensor) -> None:
    require(2 <= x.dim() <= 8, operator, f"x must have 2 to 8 dimensions, got {describe(x)}")
    require(
        1 <= gamma.dim() < x.dim() and x.shape[-gamma.dim() :] == gamma.shape,
        operator,
        f"gamma must have the last dimensions of x and fewer than x, got {describe(gamma)} for x {describe(x)}",
    )


def _require_one_dtype(operator: str, x: Tensor, gamma: Tensor) -> None:
    """Refuse float32 beside 16 bits where no page has it: op-plugin 7.1.0, torch_npu-npu_rms_norm.md, line 18."""
    rule = f"gamma must have the dtype of x, got {describe(gamma)} for x {describe(x)}"
    require_before((8, 3), x.dtype == gamma.dtype, operator, rule)


def _require_sum(operator: str, x1: Tensor, x2: Tensor, gamma: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    _require_trailing(operator, x1, gamma)
    require_dtypes(operator, {(d, d, d) for d in dtypes}, x1=x1, x2=x2, gamma=gamma)
    require(x1.shape == x2.shape, operator, f"x1 {describe(x1)} and x2 {describe(x2)} differ in shape")
    require(x1.numel() > 0, operator, f"x1 is empty: {describe(x1)}")


def _whole_reduce_sum(x: Tensor, gamma: Tensor) -> bool:
    if not (x.dtype == gamma.dtype == float16 and gamma.dim() == 1 and MERGE_N_COLUMNS < gamma.numel() <= 5120):
        return False
    return x.shape[0] <= 512 and (x.dim() == 2 or (x.dim() == 3 and x.shape[1] <= 8))
