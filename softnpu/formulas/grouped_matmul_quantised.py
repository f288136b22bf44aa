"""Say how one product of npu_grouped_matmul is computed: of floating-point tensors, of int8, with weights of int8.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_grouped_matmul.md, formulas 1 to 4 and tables 1 and 2; what is
refused: ``CheckGroupedMatmulQuant`` and ``CheckGroupedMatmulAntiQuant`` of CANN's ops-transformer,
gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp. Rounding is inferred: products of int8 are exact, scaled in
float32 and rounded once; a weight of int8 is rounded to the dtype of x before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, bfloat16, float16, float32, int8, int32, int64
from torch.nn import functional as F

from softnpu.argument_checks import describe, require
from softnpu.formulas.grouped_matmul_limits import OPERATOR
from softnpu.formulas.quantised import KEPT_BITS

Tensors = Sequence[Tensor]

ACTIVATIONS = {
    0: lambda x: x,
    1: F.relu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: F.silu,
}
# scale and result, without and with per_token_scale
PER_CHANNEL = {(int64, int8), (bfloat16, bfloat16), (float32, float16)}
PER_TOKEN = {(bfloat16, bfloat16), (float32, float16)}


@dataclass(frozen=True)
class FloatingPoint:
    """Compute ``x · w + b`` of tensors of one dtype."""

    dtype: torch.dtype

    def product(self, group: int, start: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the rows of a group; ``start`` is the first of them among those of all groups."""
        y = x.float() @ weight.float()
        return (y if bias is None else y + bias.float()).to(self.dtype)


@dataclass(frozen=True)
class Quantised:
    """Compute ``act((x · w + b) · scale · per_token_scale)`` of int8, with a scale a column and one a row."""

    dtype: torch.dtype
    scale: Tensors  # [N] a group
    per_token_scale: Tensor | None  # [M]
    act_type: int

    def product(self, group: int, start: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the rows of a group; ``start`` is the first of them among those of all groups."""
        total = (x.double() @ weight.double()).long()  # exact: below 2^53
        total = total if bias is None else total + bias
        scale = self.scale[group]
        factor = scale.float()
        if scale.dtype == int64:  # a parameter of the matrix unit: its lower half is a float32 of 19 bits
            factor = (scale.to(int32) & KEPT_BITS).view(float32)
        y = total.float() * factor
        if self.per_token_scale is not None:
            y = y * self.per_token_scale[start : start + len(x)].unsqueeze(-1)
        if self.dtype == int8:
            return torch.round(y).clamp(-128, 127).to(int8)
        return ACTIVATIONS[self.act_type](y).to(self.dtype)


@dataclass(frozen=True)
class QuantisedWeight:
    """Compute ``x · ((w + offset) · scale) + b`` of a floating-point x and w of int8, by columns."""

    dtype: torch.dtype
    scale: Tensors  # [N] a group
    offset: Tensors

    def product(self, group: int, start: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the rows of a group; ``start`` is the first of them among those of all groups."""
        restored = (weight.float() + self.offset[group].float()) * self.scale[group].float()
        return FloatingPoint(self.dtype).product(group, start, x, restored.to(self.dtype), bias)


Arithmetic = FloatingPoint | Quantised | QuantisedWeight


def arithmetic(
    x: Tensors,
    weight: Tensors,
    scale: Tensors | None,
    per_token_scale: Tensors | None,
    antiquant_scale: Tensors | None,
    antiquant_offset: Tensors | None,
    output_dtype: torch.dtype | None,
    act_type: int,
) -> Arithmetic:
    """Choose the arithmetic by the dtypes of x and weight, and refuse what does not go with it."""
    given = {"scale": scale, "per_token_scale": per_token_scale}
    given |= {"antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset}
    found = {name for name, tensors in given.items() if tensors}
    dtype = output_dtype or x[0].dtype
    quantised = x[0].dtype == int8
    wanted = {"scale"} if quantised else {"antiquant_scale", "antiquant_offset"} if weight[0].dtype == int8 else set()
    pair = f"x of {x[0].dtype} and weight of {weight[0].dtype}"
    allowed = wanted | ({"per_token_scale"} if quantised else set())
    rule = f"{pair} take {sorted(allowed)}, with {sorted(wanted)} required; given are {sorted(found)}"
    require(wanted <= found <= allowed, OPERATOR, rule)
    require(quantised or dtype == x[0].dtype, OPERATOR, f"{pair} give a result of {x[0].dtype}, not {dtype}")
    require(quantised or act_type == 0, OPERATOR, f"act_type is {act_type}; only quantised x takes an activation")
    if not quantised:
        if not wanted:
            return FloatingPoint(dtype)
        scales, offsets = (_columns(name, given[name] or [], weight, (dtype,)) for name in sorted(wanted, reverse=True))
        return QuantisedWeight(dtype, scales, offsets)
    table = PER_TOKEN if per_token_scale else PER_CHANNEL
    scales = _columns("scale", scale or [], weight, (int64, bfloat16, float32))
    known = sorted(str(pair) for pair in table)
    require(
        (scales[0].dtype, dtype) in table, OPERATOR, f"(scale, result) must be {known}, got {scales[0].dtype}, {dtype}"
    )
    require(act_type in ACTIVATIONS, OPERATOR, f"act_type is {act_type}; the device takes {list(ACTIVATIONS)}")
    require(act_type == 0 or dtype != int8, OPERATOR, "a result of int8 takes no activation")
    per_row = None
    if per_token_scale:
        per_row, rows = torch.cat(list(per_token_scale)), sum(len(part) for part in x)
        fits = per_row.dtype == float32 and list(per_row.shape) == [rows] and len(per_token_scale) == len(x)
        given_scales = [describe(t) for t in per_token_scale]
        require(fits, OPERATOR, f"per_token_scale must be float32, one number a row of x, got {given_scales}")
    return Quantised(dtype, scales, per_row, act_type)


def _columns(name: str, tensors: Tensors, weight: Tensors, dtypes: tuple[torch.dtype, ...]) -> Tensors:
    """Return one factor a column for every group: [E, N] for one weight [E, K, N], else a list of [N]."""
    single = weight[0].dim() == 3
    wanted = [[len(weight[0]), weight[0].shape[2]]] if single else [[w.shape[-1]] for w in weight]
    fits = [list(t.shape) for t in tensors] == wanted and all(t.dtype in dtypes for t in tensors)
    rule = f"{name} must be {dtypes} of the shapes {wanted}, got {[describe(t) for t in tensors]}"
    require(fits, OPERATOR, rule)
    return list(tensors[0]) if single else tensors
