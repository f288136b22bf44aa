"""Define quantisation with given scales, rows with a zero point of their own, and scales as the matrix unit takes them.

op-plugin, docs/zh/custom_APIs/torch_npu, the pages of the operators, and the golden functions of their tests,
test/test_custom_ops. Other dtypes than those of eight bits and int32 are refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, float32, int8, int32, int64, uint8

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.formulas import formula
from softnpu.formulas.cast import as_torch_dtype
from softnpu.formulas.quantised import KEPT_BITS, OFFSET_BIT, smoothed

LIMITS = {int8: (-128, 127), uint8: (0, 255), int32: (-(2**31), 2**31 - 1)}
# c10/core/ScalarType.h: qint8, quint8 and qint32, as the dtypes that hold them
NUMBERS = {12: int8, 13: uint8, 14: int32}
SCALE_FLAG = 1 << 46


@formula
def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """Return ``round(x / scale) + zero_point`` or, without div_mode, ``round(x · scale + offset)``, clamped to dtype.

    Scales and zero points are [1], or one for every element of the axis. Without div_mode the axis is the last one or
    before it, and they may have as many dimensions as x, of one but for the axis (aclnnAscendQuantV3).
    """
    operator = "npu_quantize"
    require(input.dtype in FLOATING, operator, f"input must be floating-point, got {describe(input)}")
    target = NUMBERS.get(dtype) if isinstance(dtype, int) else None
    target = target or _storage(operator, dtype)
    if target not in LIMITS or (not div_mode and target != int8):
        raise NotImplementedError(
            f"{operator}: the software device quantises to int8, or with div_mode to 8 and 32 bits"
        )
    axis = axis if div_mode else min(axis, -1)
    shape = [1] * input.dim()
    shape[axis] = input.shape[axis]
    for name, given in (("scales", scales), ("zero_points", zero_points)):
        if given is not None:
            flat = not div_mode and list(given.shape) in (shape, [1] * input.dim())
            fits = flat or (given.dim() == 1 and given.shape[0] in (1, shape[axis]))
            require(fits, operator, f"{name} must be [1] or [{shape[axis]}], got {describe(given)}")
    shape[axis] = -1
    x, scale = input.float(), scales.float().view(shape)
    offset = 0.0 if zero_points is None else zero_points.float().view(shape)
    y = torch.round(x / scale) + offset if div_mode else torch.round(x * scale + offset)
    return y.clamp(*LIMITS[target]).to(target)


@formula
def npu_trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """Return the scales as int64: the upper 19 bits of the float32, bit 46, and the offset as 9 bits from bit 37 on."""
    operator = "npu_trans_quant_param"
    require_dtypes(operator, {(float32,)}, scale=scale)
    require(round_mode in (None, 0), operator, f"the software device has round_mode 0 only, got {round_mode}")
    require(
        scale.dim() in (1, 2) and scale.numel() > 0, operator, f"scale must be [N] or [1, N], got {describe(scale)}"
    )
    if offset is not None:
        one = scale.dim() == 1 and (1 in (len(scale), len(offset)))
        fits = offset.dtype == float32 and (offset.shape == scale.shape or (one and offset.dim() == 1))
        require(fits, operator, f"offset must be float32 [1] or as long as scale, got {describe(offset)}")
        scale = scale.expand(len(offset)) if scale.shape == (1,) else scale
    bits = (scale.contiguous().view(int32) & KEPT_BITS).long() & 0xFFFFFFFF | SCALE_FLAG
    if offset is not None:
        bits = bits | (torch.round(offset).clamp(-256, 255).to(int64) & 0x1FF) << OFFSET_BIT
    return bits


@formula
def npu_dynamic_quant_asymmetric(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return every row as int8, its scale ``(max - min) / 255`` and its offset ``127 - max / scale``, in float32."""
    operator = "npu_dynamic_quant_asymmetric"
    dtype = int8 if dst_type is None else as_torch_dtype(operator, dst_type)
    if dtype != int8 or quant_mode != "pertoken" or dst_type_max != 0:
        raise NotImplementedError(f"{operator}: the software device quantises rows to int8 only")
    require_dtypes(operator, {(float16,), (bfloat16,)}, input=input)
    require(input.dim() > 1 and input.numel() > 0, operator, f"x must have two dimensions, got {describe(input)}")
    x = smoothed(operator, input, smooth_scales, group_index)
    largest, least = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    scale = (largest - least) / 255
    offset = 127 - largest / scale
    y = torch.round(x / scale + offset).nan_to_num(0.0).clamp(-128, 127)
    shape = input.shape[:-1]
    return y.to(int8).view(input.shape), scale.view(shape), offset.view(shape)


def _storage(operator: str, dtype: int | torch.dtype) -> torch.dtype:
    """Return the dtype that holds a quantised one."""
    held = {torch.qint8: int8, torch.quint8: uint8, torch.qint32: int32}
    return held[dtype] if dtype in held else as_torch_dtype(operator, dtype)
