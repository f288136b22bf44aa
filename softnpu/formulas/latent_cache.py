"""Define npu_kv_rmsnorm_rope_cache, which norms and rotates what multi-head latent attention keeps, and keeps it.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_kv_rmsnorm_rope_cache.md and
op_plugin/ops/opapi/KvRmsNormRopeCacheNpuOpApi.cpp. Rounding is inferred: float32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, int64

from softnpu.argument_checks import describe, require, require_dtypes
from softnpu.formulas import formula
from softnpu.formulas.rotary_inference import interleaved

LATENT, ROTARY = 512, 64
PAGED = ("PA", "PA_BNSD")


@formula
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write the norm of the first 512 features of kv [B, 1, S, 576] to ckv_cache and the rotated rest to k_cache.

    Return both caches, and the rotated and the normed features, which are written in the paged modes with is_output_kv
    only, and are NaN elsewhere. index is [B, S], the places in each cache [B, 1, L, D], or [B · S] over all places of
    paged caches [blocks, block_size, 1, D].
    """
    operator = "npu_kv_rmsnorm_rope_cache"
    given = [k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v]
    if cache_mode not in ("Norm", *PAGED) or any(t is not None for t in given):
        raise NotImplementedError(
            f"{operator}: the software device has the cache modes Norm, PA and PA_BNSD, without scales and v"
        )
    tensors = {"kv": kv, "gamma": gamma, "cos": cos, "sin": sin, "k_cache": k_cache, "ckv_cache": ckv_cache}
    require_dtypes(operator, {(d,) * 6 for d in (float16, bfloat16)}, **tensors)
    fits = kv.dim() == 4 and kv.shape[1] == 1 and kv.shape[3] == LATENT + ROTARY
    require(fits, operator, f"kv must be [B, 1, S, {LATENT + ROTARY}], got {describe(kv)}")
    b, _, s, _ = kv.shape
    paged = cache_mode in PAGED
    require_dtypes(operator, {(int64,)}, index=index)
    turn = [b, 1, s, ROTARY]
    for name, tensor, shape in (
        ("gamma", gamma, [LATENT]),
        ("index", index, [b * s] if paged else [b, s]),
        ("cos", cos, turn),
        ("sin", sin, turn),
    ):
        require(list(tensor.shape) == shape, operator, f"{name} must be {shape}, got {describe(tensor)}")
    for name, cache, size in (("k_cache", k_cache, ROTARY), ("ckv_cache", ckv_cache, LATENT)):
        one = cache.dim() == 4 and cache.shape[2 if paged else 1] == 1
        fits = one and cache.shape[-1] == size and (paged or (cache.shape[0] == b and cache.shape[2] >= s))
        form = f"[blocks, block_size, 1, {size}]" if paged else f"[{b}, 1, {s} or more, {size}]"
        require(fits, operator, f"{name} must be {form}, got {describe(cache)}")
        if paged:
            least = -(-s // cache.shape[1]) * b
            require(cache.shape[0] >= least, operator, f"{name} must have {least} blocks, got {describe(cache)}")
        require(cache.is_contiguous(), operator, f"{name} must be contiguous")
    require(k_cache.shape[:-1] == ckv_cache.shape[:-1], operator, "the caches differ in their places")
    places = k_cache.shape[0] * k_cache.shape[1] if paged else k_cache.shape[2]
    inside = bool(((index >= 0) & (index < places)).all())
    require(inside, operator, f"index must be below the {places} places of the cache")
    unique = all(len(row.unique()) == len(row) for row in index.view(-1, b * s if paged else s))
    require(unique, operator, "index must not name a place twice")

    x = kv[..., :LATENT].float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float()).to(kv.dtype)
    rotated = interleaved(kv[..., LATENT:], cos, sin).to(kv.dtype)
    for cache, new in ((k_cache, rotated), (ckv_cache, normed)):
        if paged:
            cache.view(places, -1)[index] = new.reshape(b * s, -1)
        else:
            cache[torch.arange(b).unsqueeze(-1), 0, index] = new[:, 0]
    if not (paged and is_output_kv):
        rotated, normed = torch.full_like(rotated, torch.nan), torch.full_like(normed, torch.nan)
    return k_cache, ckv_cache, rotated, normed
