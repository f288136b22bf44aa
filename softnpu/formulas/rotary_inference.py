"""Define rotary position embedding for inference: query and key in one, DeepSeek's order, and positions by a cache.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu, the pages of the operators; the head sizes of
npu_mrope: CANN's ops-transformer, posembedding/rope_with_sin_cos_cache/README.md. Rounding: that of
npu_apply_rotary_pos_emb from posembedding/apply_rotary_pos_emb/op_kernel, of the others inferred: float32, once.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, cat, float16, float32, int32, int64, stack

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.cann import CANN, require_before
from softnpu.formulas import formula

LOCAL_MEMORY = 192 * 1024  # bytes of a vector core
SECTIONS = ([16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])


@formula
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Compute ``x · cos + [-x2, x1] · sin`` over query [B, S, N, D], or [T, N, D], and key, and return both.

    The layout BSH of older releases is BSND. It writes to its arguments. float16 rounds both products and their sum,
    bfloat16 the sum only.
    """
    operator = "npu_apply_rotary_pos_emb"
    dims = {"BSND": 4, "BSH": 4, "TND": 3}
    require(layout in dims, operator, f"layout must be BSND or TND, got {layout!r}")
    require(rotary_mode == "half", operator, f"rotary_mode must be half, got {rotary_mode!r}")
    tensors = {"query": query, "key": key, "cos": cos, "sin": sin}
    require_dtypes(operator, {(d,) * 4 for d in FLOATING}, **tensors)
    for name, tensor in tensors.items():
        fits = tensor.dim() == dims[layout] and tensor.numel() > 0 and tensor.shape[-1] in (64, 128)
        rule = f"{name} must be {layout}, not empty, with a head size of 64 or 128, got {describe(tensor)}"
        require(fits, operator, rule)
        same = tensor.shape[:-2] == query.shape[:-2] and tensor.shape[-1] == query.shape[-1]
        rule = f"{name} must have the tokens and the head size of query, got {describe(tensor)}"
        require(same and (name in ("query", "key") or tensor.shape[-2] == 1), operator, f"{rule} for {describe(query)}")
    for x in (query, key):
        if x.dtype == float16:
            x.copy_(x * cos + _half(x) * sin)
        else:
            x.copy_(x.float() * cos.float() + _half(x.float()) * sin.float())
    return query, key


@formula
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Put the even features of [B, N, S, 64] before the odd ones, and rotate the halves."""
    operator = "npu_interleave_rope"
    require_dtypes(operator, {(d,) * 3 for d in (float16, bfloat16)}, x=x, cos=cos, sin=sin)
    fits = x.dim() == 4 and x.shape[-1] == 64 and x.is_contiguous()
    require(fits, operator, f"x must be contiguous [B, N, S, 64], got {describe(x)}")
    shapes = [[x.shape[0], 1, s, 64] for s in {1, x.shape[2]}]
    for name, tensor in (("cos", cos), ("sin", sin)):
        fits = list(tensor.shape) in shapes and tensor.shape == cos.shape and tensor.is_contiguous()
        require(fits, operator, f"{name} must be contiguous and one of {shapes}, got {describe(tensor)}")
    return interleaved(x, cos, sin).to(x.dtype)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in float32 what lies as pairs, and return it as halves."""
    x = cat([x[..., ::2], x[..., 1::2]], -1).float()
    return x * cos.float() + _half(x) * sin.float()


@formula
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Rotate the first features of every head of query and key [T, heads · head_size] by rows of the cache.

    The cache [positions, R] holds cos and sin, R / 2 of each. With mrope_section the positions are [3 or 4, T], and
    each of them serves a section of the features, in turn with cache_mode "interleave". Results are laid out as the
    arguments.
    """
    operator = "npu_mrope"
    rotary_mode, cache_mode = rotary_mode or "half", cache_mode or "default"
    section = mrope_section if mrope_section and any(mrope_section) else None
    # op-plugin's page says interleaved, its RopeWithSinCosCacheKernelNpuOpApi.cpp and its tests interleave
    known = rotary_mode in ("half", "interleave", "interleaved")
    require(known, operator, f"rotary_mode only support half or interleave, got {rotary_mode!r}")
    known = cache_mode in ("default", "interleave")
    require(known, operator, f"cache_mode only support default or interleave, got {cache_mode!r}")
    tensors = {"query": query, "key": key, "cos_sin_cache": cos_sin_cache}
    require_dtypes(operator, {(d,) * 3 for d in FLOATING}, **tensors)
    require_dtypes(operator, {(int32,), (int64,)}, positions=positions)
    rows, size = cos_sin_cache.shape[0], cos_sin_cache.shape[-1]
    step = 16 if query.dtype == float32 else 32
    fits = cos_sin_cache.dim() == 2 and 0 < size <= head_size <= 128 and size % step == head_size % step == 0
    rule = f"cos_sin_cache must be [positions, R], R and the head size up to 128 by {step}, R at most the head size"
    require(fits, operator, f"{rule}, got {describe(cos_sin_cache)} and {head_size}")
    expected = [len(section), len(query)] if section else [len(query)]
    require(list(positions.shape) == expected, operator, f"positions must be {expected}, got {describe(positions)}")
    for name in ("query", "key"):
        x = tensors[name]
        fits = x.dim() == 2 and len(x) == len(query) and x.shape[1] % head_size == 0
        require(fits, operator, f"{name} must be [T, heads · {head_size}], got {describe(x)}")
    heads = max(query.shape[1], key.shape[1]) // head_size
    _require_heads(operator, heads, head_size, size, rotary_mode == "half")
    inside = bool(((positions >= 0) & (positions < rows)).all())
    require(inside, operator, f"positions must be below the {rows} rows of the cache")
    if section:
        fits = section in SECTIONS and sum(section) == size // 2
        require(fits, operator, f"mrope_section must be one of {SECTIONS} with a sum of {size // 2}, got {section}")
    ordered = cache_mode == "default" or not section or len(section) == 3
    require(ordered, operator, "cache_mode interleave takes three sections, or none")
    cos, sin = (
        _by_section(t, section, cache_mode).float().unsqueeze(1) for t in cos_sin_cache[positions.long()].chunk(2, -1)
    )
    return _turned(query, head_size, cos, sin, rotary_mode), _turned(key, head_size, cos, sin, rotary_mode)


def _require_heads(operator: str, heads: int, head_size: int, rotated: int, in_halves: bool) -> None:
    """Refuse tokens of which none fits into local memory: the host divides by how many do, unless it asks before.

    rope_with_sin_cos_cache/op_host/rope_with_sin_cos_cache_tiling.cpp of November 2025, and of 8.5.0, lines 166 to 174.
    """
    if CANN < (8, 5):
        free, size = LOCAL_MEMORY, rotated * (8 if in_halves else 10) + head_size
    else:
        free, size = LOCAL_MEMORY - 4 * 10 * rotated, rotated * (5 if in_halves else 6) + 2 * head_size
    rule = f"the tiling divides by maxNPerLoopForUb, which is zero for {heads} heads of {head_size}: SIGFPE, or a hang"
    require_before((9, 0), 4 * heads * size <= free, operator, rule)


def _by_section(table: Tensor, section: list[int] | None, mode: str) -> Tensor:
    """Choose for every feature of [positions, T, R / 2] the position that serves it."""
    if section is None:
        return table
    if mode == "default":
        return cat([part[i] for i, part in enumerate(table.split(section, -1))], -1)
    chosen, end = table[0].clone(), section[1] * 3
    for i in (1, 2):
        chosen[:, i:end:3] = table[i, :, i:end:3]
    return chosen


def _turned(x: Tensor, head_size: int, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    heads = x.unflatten(-1, (-1, head_size)).float()
    size = 2 * cos.shape[-1]
    turned, rest = heads[..., :size], heads[..., size:]
    a, b = turned.chunk(2, -1) if mode == "half" else (turned[..., ::2], turned[..., 1::2])
    parts = a * cos - b * sin, b * cos + a * sin
    turned = cat(parts, -1) if mode == "half" else stack(parts, -1).flatten(-2)
    return torch.empty_like(x).copy_(cat([turned, rest], -1).flatten(1))


def _half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return cat([-b, a], -1)
