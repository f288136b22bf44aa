"""Define quantisation to int8 by row, and products of int8 matrices and of int8 weights.

op-plugin, docs/zh/custom_APIs/torch_npu, the pages of the operators. Rounding of npu_dynamic_quant: CANN's ops-nn,
quant/dynamic_quant/op_kernel/dynamic_quant.h; scales of npu_quant_matmul that op-plugin turns into a parameter of the
matrix unit: quant/trans_quant_param_v2/docs. The rest is inferred: products are exact, scaled in float32, rounded once.
Other dtypes than int8, other modes and groups of scales are refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, float32, int8, int32

from softnpu.argument_checks import describe, require, require_dtypes, require_values
from softnpu.formulas import formula
from softnpu.formulas.cast import as_torch_dtype

LARGEST = 127.0
LONGEST = 65535
OFFSET_BIT = 37  # of such a scale: the first of the nine bits of the offset
KEPT_BITS = ~0x1FFF  # of a scale that is a parameter of the matrix unit: the upper 19


@formula
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return ``round(x · 127 / max|x|)`` of every row as int8, and its inverse scale in float32.

    smooth_scales [H] multiply x first; with group_index [G], where groups of rows end, they are [G, H]. A row of zeros
    has the scale zero.
    """
    operator = "npu_dynamic_quant"
    dtype = int8 if dst_type is None else as_torch_dtype(operator, dst_type)
    if dtype != int8 or quant_mode != "pertoken" or dst_type_max != 0:
        raise NotImplementedError(f"{operator}: the software device quantises rows to int8 only")
    require_dtypes(operator, {(float16,), (bfloat16,)}, input=input)
    require(input.dim() > 1 and input.numel() > 0, operator, f"x must have two dimensions, got {describe(input)}")
    x = smoothed(operator, input, smooth_scales, group_index)
    factor = LARGEST / x.abs().amax(-1, keepdim=True)
    y = torch.round(x * factor).nan_to_num(0.0)  # zeros times infinity
    return y.to(int8).view(input.shape), (1 / factor).view(input.shape[:-1])


@formula
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """Compute ``(x1 · x2 + bias) · scale · pertoken_scale``, or with a floating bias that added last, as int8, float16
    or bfloat16, for x1 [..., M, K] and x2 [..., K, N] of int8, scale [1] or [N] and pertoken_scale [M].

    A scale of int64 is npu_trans_quant_param's. Without pertoken_scale a float32 scale for int8 or float16 keeps its
    upper 19 bits. int8 adds the offset, rounded.
    """
    operator = "npu_quant_matmul"
    dtype = int8 if output_dtype is None else as_torch_dtype(operator, output_dtype)
    other = [x1_dtype, x2_dtype, pertoken_scale_dtype, scale_dtype, y_scale, group_sizes or None]
    if x1.dtype != int8 or x2.dtype != int8 or dtype == int32 or any(t is not None for t in other):
        raise NotImplementedError(
            f"{operator}: the software device has int8 matrices without groups, and no int32 result"
        )
    if scale.dtype == torch.int64:  # as npu_trans_quant_param makes them, with the offset of a result of int8
        require(offset is None and pertoken_scale is None, operator, "int64 scales take no offset and pertoken_scale")
        nine = scale >> OFFSET_BIT & 0x1FF
        offset = torch.where(nine < 256, nine, nine - 512).float() if dtype == int8 else None
        scale = (scale.to(int32) & KEPT_BITS).view(float32)
        scale, offset = scale.flatten(), None if offset is None else offset.flatten()
    fits = 2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6 and x1.shape[-1] == x2.shape[-2]
    require(fits, operator, f"needs [..., M, K] and [..., K, N], got {describe(x1)} and {describe(x2)}")
    require(max(x1.shape[-1], x2.shape[-1]) <= LONGEST, operator, f"K and N must be at most {LONGEST}")
    require(x1.numel() > 0 and x2.numel() > 0, operator, f"empty: {describe(x1)}, {describe(x2)}")
    _require_combination(operator, dtype, scale, offset, pertoken_scale, bias)
    m, n = x1.shape[-2], x2.shape[-1]
    for name, tensor, sizes in (
        ("scale", scale, (1, n)),
        ("offset", offset, (1, n)),
        ("pertoken_scale", pertoken_scale, (m,)),
    ):
        fits = tensor is None or (tensor.dim() == 1 and tensor.shape[0] in sizes)
        require(
            fits,
            operator,
            f"{name} must be [{' or '.join(map(str, sizes))}], got {tensor if tensor is None else describe(tensor)}",
        )
    total = (x1.double() @ x2.double()).long()  # exact: below 2^53
    if bias is not None:
        batch = total.shape[:-2].numel()
        fits = bias.shape == (n,) or (total.dim() == 3 and bias.shape == (batch, 1, n))
        require(fits, operator, f"bias must be [{n}], or [{batch}, 1, {n}] for three dimensions, got {describe(bias)}")
        total = total + bias if bias.dtype == int32 else total
    factor = scale.float()
    if pertoken_scale is None and scale.dtype == float32 and dtype != bfloat16:
        factor = (factor.contiguous().view(int32) & KEPT_BITS).view(float32)
    out = total.float() * factor
    if pertoken_scale is not None:
        out = out * pertoken_scale.unsqueeze(-1)
    if bias is not None and bias.dtype != int32:
        out = out + bias.float()
    if dtype == int8:
        out = out + (0 if offset is None else torch.round(offset).clamp(-256, 255))
        out = torch.round(out).clamp(-128, 127)
    return out.to(dtype)


@formula
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """Compute ``x · ((weight + offset) · scale) + bias`` for x [M, K] and weight [K, N] of int8.

    int32 holds eight numbers of four bits, as npu_convert_weight_to_int4pack packs them: [K, N / 8], or [K / 8, N] that
    lies transposed. Scale and offset are [1], [1, N] or [N], or with a group size G [ceil(K / G), N]. The weight is
    rounded to the dtype of x, in which it is multiplied.
    """
    operator = "npu_weight_quant_batchmatmul"
    floating = antiquant_scale.dtype in (float16, bfloat16)
    if weight.dtype not in (int8, int32) or not floating or weight_dtype is not None:
        raise NotImplementedError(f"{operator}: the software device has int8 and int4 with floating scales only")
    if weight.dtype == int32 and weight.dim() == 2:
        weight = _four_bit_numbers(operator, weight)
        says = f"int4 weights of {weight.shape[0]} rows, contiguous or transposed as they lie, for {describe(x)}"
        require(weight.shape[0] == x.shape[-1], operator, says)
    if quant_scale is not None or quant_offset is not None:
        raise NotImplementedError(f"{operator}: the software device has no form of the operator with quant_scale")
    require_dtypes(operator, {(d, d) for d in (float16, bfloat16)}, x=x, antiquant_scale=antiquant_scale)
    fits = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[0] and x.numel() > 0 and weight.numel() > 0
    require(fits, operator, f"needs [M, K] and [K, N], got {describe(x)} and {describe(weight)}")
    k, n = weight.shape
    require(max(k, n) <= LONGEST, operator, f"K and N must be at most {LONGEST}, got {k} and {n}")
    size = antiquant_group_size
    require(inner_precise in (0, 1), operator, f"inner_precise must be 0 or 1, got {inner_precise}")
    if size:
        require(
            32 <= size < k and size % 32 == 0, operator, f"antiquant_group_size must be 32 to K - 1 by 32, got {size}"
        )
    shapes = [[-(-k // size), n]] if size else [[1], [n], [1, n], [1, 1]]
    if antiquant_offset is not None:
        fits = antiquant_offset.shape == antiquant_scale.shape and antiquant_offset.dtype == x.dtype
        require(
            fits, operator, f"antiquant_offset must be {describe(antiquant_scale)}, got {describe(antiquant_offset)}"
        )
    given = list(antiquant_scale.shape)
    require(given in shapes, operator, f"antiquant_scale must be one of {shapes}, got {given}")
    scale, offset = (
        t.float().repeat_interleave(size, 0)[:k] if size and t is not None else t
        for t in (antiquant_scale, antiquant_offset)
    )
    restored = weight.float() + (0 if offset is None else offset.float())
    restored = (restored * scale.float()).to(x.dtype)  # type: ignore[union-attr]  # always given
    out = x.float() @ restored.float()
    if bias is not None:
        dtype = float16 if x.dtype == float16 else float32
        fits = bias.dtype == dtype and list(bias.shape) in ([n], [1, n])
        require(fits, operator, f"bias must be {dtype} [{n}] or [1, {n}], got {describe(bias)}")
        out = out + bias.float()
    return out.to(x.dtype)


def _four_bit_numbers(operator: str, packed: Tensor) -> Tensor:
    """Return the signed numbers of four bits in int32, the lowest bits first, along the side that lies contiguous."""
    is_transposed = packed.stride() == (1, packed.shape[0]) and packed.numel() > 1
    require(is_transposed or packed.is_contiguous(), operator, "weight must be contiguous, or so transposed")
    require(not is_transposed or packed.shape[0] > 1, operator, "8 numbers of four bits are no column, transposed")
    rows = packed.t() if is_transposed else packed
    numbers = torch.stack([rows << 28 - 4 * place >> 28 for place in range(8)], -1).flatten(1).to(int8)
    return numbers.t() if is_transposed else numbers


def smoothed(operator: str, input: Tensor, scales: Tensor | None, ends: Tensor | None) -> Tensor:
    """Return the rows in float32, times their scales if there are any."""
    x = input.float().reshape(-1, input.shape[-1])
    if scales is not None:
        return x * _smooth(operator, input, scales, ends, len(x))
    require(ends is None, operator, "group_index needs smooth_scales")
    return x


def _smooth(operator: str, x: Tensor, scales: Tensor, ends: Tensor | None, rows: int) -> Tensor:
    """Return the scales of every row."""
    require(scales.dtype == x.dtype, operator, f"smooth_scales must be {x.dtype}, got {describe(scales)}")
    h = x.shape[-1]
    if ends is None:
        require(scales.shape == (h,), operator, f"smooth_scales must be [{h}], got {describe(scales)}")
        return scales.float()
    fits = scales.dim() == 2 and scales.shape[1] == h and ends.dtype == int32 and ends.shape == scales.shape[:1]
    given = f"got {describe(scales)} and {describe(ends)}"
    require(fits, operator, f"smooth_scales must be [G, {h}] and group_index int32 [G], {given}")
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    fits = bool((counts >= 0).all()) and int(ends[-1]) == rows
    require_values(fits, operator, f"group_index must not fall and end with {rows}, got {ends.tolist()}")
    return scales.float().repeat_interleave(counts.long(), 0)


def _require_combination(
    operator: str, out: torch.dtype, scale: Tensor, offset: Tensor | None, pertoken: Tensor | None, bias: Tensor | None
) -> None:
    """Refuse combinations of dtypes that are not in the table of the documentation."""
    scales = (float32, bfloat16) if out == bfloat16 else (float32,)
    biases = (int32, bfloat16, float32) if out == bfloat16 or pertoken is not None else (int32,)
    fits = out in (int8, float16, bfloat16) and scale.dtype in scales
    fits = fits and (offset is None or (out == int8 and offset.dtype == float32))
    fits = fits and (pertoken is None or (out != int8 and pertoken.dtype == float32))
    fits = fits and (bias is None or bias.dtype in biases)
    given = {"scale": scale, "offset": offset, "pertoken_scale": pertoken, "bias": bias}
    dtypes = ", ".join(f"{name} {t.dtype}" for name, t in given.items() if t is not None)
    require(fits, operator, f"the device has no {out} result of {dtypes}")
