"""Define rotary position embedding.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu, npu_rotary_mul, and CANN's documentation of
aclnnRotaryPositionEmbedding. Rounding: CANN's ops-transformer, posembedding/rotary_position_embedding/op_kernel.

The device infers the layout from shapes. One pair of shapes can fit several layouts, which all mean the same broadcast
but have limits of their own. Here the shapes are refused if they can be read as BNSD and break a rule of BNSD, whatever
else they fit; otherwise one layout within its limits is enough. Where cos has the shape of x there is nothing to
broadcast, and no rule of BNSD: rotary_position_embedding/op_host/rope_rotate_half_tiling.cpp, ChooseTilingMode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.cann import require_before
from softnpu.formulas import formula
from softnpu.host_call import needs_gradient

# The documentation of the limit says coreNum, and not whether that counts the 24 cores of Ascend 910B1 or the two
# vector units that each of them has. The limit shrinks with the number: the larger one is the strict reading.
VECTOR_CORES = 48
LAYOUTS = {"BNSD": ("11SD", "B1SD", "BNSD"), "BSND": ("1S1D", "BS1D", "BSND"), "SBND": ("S11D", "SB1D", "SBND")}
TND = {"TND": ("T1D", "TND")}
INTERLEAVED = ("11SD", "1S1D", "S11D", "T1D")


@dataclass(frozen=True)
class Reading:
    """Say what the shapes may mean. T of TND counts as S, with B = 1."""

    layout: str
    cos_layout: str
    b: int
    n: int
    s: int


@formula
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Compute ``x · cos + rotated(x) · sin`` in float32, rounded once; r1 is cos and r2 is sin.

    "half" turns ``[x1, x2]`` into ``[-x2, x1]``, "interleave" each pair ``(x0, x1)`` into ``(-x1, x0)``. With rotate
    [D, D] it is ``x · rotate``, without a gradient. cos and sin of another dtype are cast to that of x first, as
    op-plugin does.
    """
    _require("npu_rotary_mul", input, r1, r2, rotary_mode)
    x, cos, sin = (t.to(input.dtype).float() for t in (input, r1, r2))
    if rotate is None:
        rotated = _rotated(x, rotary_mode)
    else:
        d = input.shape[-1]
        fits = rotate.shape == (d, d) and rotate.dtype == input.dtype
        rule = f"rotate must be {input.dtype} [{d}, {d}], got {describe(rotate)}"
        require(fits, "npu_rotary_mul", rule)
        wanted = torch.is_grad_enabled() and any(needs_gradient(t) for t in (input, r1, r2))
        require(not wanted, "npu_rotary_mul", "with rotate there is no gradient: torch_npu would rotate by rotary_mode")
        rotated = x @ rotate.float()
    return (x * cos + rotated * sin).to(input.dtype).contiguous()


@formula
def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``dx = dy · cos − rotated(dy · sin)``; dcos and dsin are sums of ``dy · x`` and ``dy · rotated(x)``.

    All in float32, rounded once to the dtype of x. dcos and dsin stay unwritten, here NaN, if neither cos nor sin
    requires a gradient.
    """
    operator = "npu_rotary_mul_backward"
    readings = _require(operator, input, r1, r2, rotary_mode)
    if rotary_mode == "half" and input.dim() == 4:
        _require_layout_of_gradient(operator, input, r1)
    require(grad.shape == input.shape, operator, f"dy {describe(grad)} and x {describe(input)} differ in shape")
    require_dtypes(operator, {(d, d) for d in FLOATING}, grad=grad, input=input)
    dy, x, cos, sin = (t.to(input.dtype).float() for t in (grad, input, r1, r2))
    dx = dy * cos - _rotated(dy * sin, rotary_mode)  # the rotation is antisymmetric
    if needs_gradient(r1) or needs_gradient(r2):
        _require_gradient_of_cos(operator, readings, input, r1)
        dcos, dsin = (dy * x).sum_to_size(r1.shape), (dy * _rotated(x, rotary_mode)).sum_to_size(r2.shape)
    else:
        dcos, dsin = torch.full_like(r1.float(), torch.nan), torch.full_like(r2.float(), torch.nan)
    return tuple(t.to(input.dtype).contiguous() for t in (dx, dcos, dsin))  # type: ignore[return-value]


def _rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        x1, x2 = x.chunk(2, -1)
        return torch.cat((-x2, x1), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _readings(x: Tensor, cos: Tensor) -> Iterator[Reading]:
    """Yield every layout that the shapes fit."""
    for layout, forms in (TND if x.dim() == 3 else LAYOUTS).items():
        sizes = dict(zip(layout, x.shape)) | {"1": 1}
        for form in forms:
            if tuple(cos.shape[:-1]) == tuple(sizes[axis] for axis in form[:-1]):
                yield Reading(layout, form, sizes.get("B", 1), sizes["N"], sizes.get("S", sizes.get("T", 1)))


def _require(operator: str, x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> list[Reading]:
    rule = f"The rotary_mode of {operator} should be half or interleave, but got {mode!r}"
    require(mode in ("half", "interleave"), operator, rule)
    require_dtypes(operator, {(a, b, c) for a in FLOATING for b in FLOATING for c in FLOATING}, x=x, cos=cos, sin=sin)
    require(x.dim() in (3, 4), operator, f"x must have 3 or 4 dimensions, got {describe(x)}")
    # op-plugin 7.1.0 and 7.2.0, torch_npu-npu_rotary_mul.md; rope_rotate_half_tiling.cpp of November 2025, line 385
    require_before((8, 5), x.dim() == 4, operator, f"the input shape must be 4-dimensional, got {describe(x)}")
    require(x.numel() > 0, operator, f"x is empty: {describe(x)}")
    d = x.shape[-1]
    require(d % 2 == 0, operator, f"the head size must be even, got {describe(x)}")
    require(d < 896, operator, f"the head size must be below 896, got {describe(x)}")
    require(cos.shape == sin.shape, operator, f"cos {describe(cos)} and sin {describe(sin)} differ in shape")
    fits = cos.dim() == x.dim() and cos.shape[-1] == d
    require(fits, operator, f"cos must have the dimensions and the head size of x {describe(x)}, got {describe(cos)}")
    found = list(_readings(x, cos))
    given = f"x {describe(x)} with cos {describe(cos)}"
    require(bool(found), operator, f"{given} is none of the layouts {LAYOUTS | TND}")
    if mode == "interleave":
        found = [r for r in found if r.cos_layout in INTERLEAVED]
        require(bool(found), operator, f"{given}: interleave takes cos as {', '.join(INTERLEAVED)} only")
        found = [r for r in found if r.b * r.n < 1000]
        require(bool(found), operator, f"{given}: interleave needs B·N < 1000")
        return found
    for r in found:
        if r.layout == "BNSD" and x.shape != cos.shape:
            _require_bnsd(operator, r, x, given)
    found = [r for r in found if r.b < 1000 and r.n < 1000]
    require(bool(found), operator, f"{given}: half needs B < 1000 and N < 1000")
    return found


def _require_bnsd(operator: str, r: Reading, x: Tensor, given: str) -> None:
    if x.shape[-1] // 2 * x.element_size() % 32 == 0:
        require(r.b * r.n <= 8 * r.s, operator, f"{given}, read as BNSD, needs B·N <= 8·S")
    elif x.shape[-1] < 80:
        fits = r.b * r.n * 2 <= ceil(r.s / VECTOR_CORES)
        rule = f"with halves that do not fill blocks of 32 bytes needs 2·B·N <= S / {VECTOR_CORES} or a head size of 80"
        require(fits, operator, f"{given}, read as BNSD, {rule}")


def _require_layout_of_gradient(operator: str, x: Tensor, cos: Tensor) -> None:
    """Refuse what the gradient finds no layout for.

    CANN's ops-transformer, rotary_position_embedding_grad/op_host/rope_half_grad_tiling.cpp, RopeHalfGradSelectLayout.
    """
    (x0, x1, x2, _), (c0, c1, c2, _) = x.shape, cos.shape
    fits = (
        x.shape == cos.shape
        or (x0 != 1 and c0 == 1 and x1 == c1 and c2 == 1)  # 1S1D
        or (x0 != 1 and c0 == c1 == 1 and x2 == c2)  # 11SD
        or (x0 == c0 and c1 == 1 and x2 == c2 and x0 < x2)  # B1SD
        or (x0 == c0 and x1 != 1 and c1 == c2 == 1)  # S11D
        or (x0 == c0 and x1 == c1 and c2 == 1)  # BS1D, SB1D
    )
    require(fits, operator, f"invalid shape! x shape: {list(x.shape)} and cos shape: {list(cos.shape)}")


def _require_gradient_of_cos(operator: str, readings: list[Reading], x: Tensor, cos: Tensor) -> None:
    given = f"x {describe(x)} with cos {describe(cos)}, whose gradient is needed"
    require(any(r.b * r.n <= 1024 for r in readings), operator, f"{given}: needs B·N <= 1024")
    for r in readings:  # SB1D has no such rule, but its shapes can be those of BS1D
        require(
            r.cos_layout not in ("B1SD", "BS1D") or r.b < r.s, operator, f"{given}, read as {r.cos_layout}, needs B < S"
        )
