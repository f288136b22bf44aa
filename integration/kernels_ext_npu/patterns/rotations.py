"""The rotary functions of transformers: they rotate the halves of a head, or its neighbours, against each other.

q and k are ``[B, N, S, D]``, or ``[B, S, N, D]`` with another unsqueeze_dim; cos and sin ``[B, S, D]``. Docstrings say
in what a function differs from these shapes, and from others with the same parameters. rotate_neighbours.py has
functions of other forms.
"""

import torch

from kernels_ext_npu.patterns.pattern import Pattern, reworded


# ---- halves of a head against each other -----------------------------------------------------------------------------
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


# turns by the negative angle
rotate_half_reversed = reworded("rotate_half_reversed", rotate_half, {"-x2, x1": "x2, -x1"})


def rotate_pairs(x):
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def rotate_neighbours(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack([-x2, x1], dim=-1).flatten(-2)


def llama(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def modernbert(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate in float32; k gets the dtype of q."""
    original_dtype = q.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
    k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
    return q_embed.to(original_dtype), k_embed.to(original_dtype)


def _apply_halves(x, cos, sin):
    first_half, second_half = torch.chunk(x, 2, dim=-1)
    first_ = first_half * cos - second_half * sin
    second_ = second_half * cos + first_half * sin
    return torch.cat((first_, second_), dim=-1)


def _apply_neighbours(x, cos, sin):
    first_half, second_half = x[..., ::2], x[..., 1::2]
    first_ = first_half * cos - second_half * sin
    second_ = second_half * cos + first_half * sin
    return torch.stack((first_, second_), dim=-1).flatten(-2)


def gemma4(x, cos, sin, unsqueeze_dim=1):
    """Rotate one tensor, in place of q and k."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return (x * cos) + (rotate_half(x) * sin)


def qwen2_vl_multimodal(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """Compose cos and sin of time, height and width, as embeddings do by now, and rotate by them."""
    mrope_section = mrope_section * 2
    cos = torch.cat([m[i % 3] for i, m in enumerate(cos.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    sin = torch.cat([m[i % 3] for i, m in enumerate(sin.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def deepseek_v4(x, cos, sin, unsqueeze_dim=1):
    """Rotate the tail of each head of one tensor, in float32; cos and sin are half as wide as the tail."""
    cos = cos.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    sin = sin.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    rope_dim = cos.shape[-1]
    nope, rope = x[..., :-rope_dim], x[..., -rope_dim:]
    rotated = ((rope.float() * cos) + (rotate_pairs(rope).float() * sin)).to(x.dtype)
    return torch.cat([nope, rotated], dim=-1)


# ---- part of a head --------------------------------------------------------------------------------------------------
def gpt_neox(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return q_embed, k_embed


def qwen4_exp(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rope, q_nope = q[..., :rotary_dim], q[..., rotary_dim:]
    q_rope = (q_rope * cos) + (rotate_half(q_rope) * sin)
    q_rotated = torch.cat([q_rope, q_nope], dim=-1)
    if k is not None:
        k_rope, k_nope = k[..., :rotary_dim], k[..., rotary_dim:]
        k_rope = (k_rope * cos) + (rotate_half(k_rope) * sin)
        k_rotated = torch.cat([k_rope, k_nope], dim=-1)
        return q_rotated, k_rotated
    else:
        return q_rotated


# ---- vision ----------------------------------------------------------------------------------------------------------
def qwen2_vl_vision(q, k, cos, sin):
    """Rotate in float32; q and k are ``[S, N, D]`` or ``[B, S, N, D]``."""
    orig_q_dtype = q.dtype
    orig_k_dtype = k.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    q_embed = q_embed.to(orig_q_dtype)
    k_embed = k_embed.to(orig_k_dtype)
    return q_embed, k_embed


def minimax_m3_vl_vision(q, k, cos, sin):
    rot_dim = cos.shape[-1]
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    q_rot, q_pass = q[..., :rot_dim], q[..., rot_dim:]
    k_rot, k_pass = k[..., :rot_dim], k[..., rot_dim:]
    q_rot = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_rot = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_rot, q_pass], dim=-1), torch.cat([k_rot, k_pass], dim=-1)


def dinov3_vit(q, k, cos, sin, **kwargs):
    """Rotate the patches only: the tokens before them have no position."""
    num_tokens = q.shape[-2]
    num_patches = sin.shape[-2]
    num_prefix_tokens = num_tokens - num_patches
    q_prefix_tokens, q_patches = q.split((num_prefix_tokens, num_patches), dim=-2)
    k_prefix_tokens, k_patches = k.split((num_prefix_tokens, num_patches), dim=-2)
    q_patches = (q_patches * cos) + (rotate_half(q_patches) * sin)
    k_patches = (k_patches * cos) + (rotate_half(k_patches) * sin)
    q = torch.cat((q_prefix_tokens, q_patches), dim=-2)
    k = torch.cat((k_prefix_tokens, k_patches), dim=-2)
    return q, k


# ---- functions that differ from another one in a few words -----------------------------------------------------------
_NEIGHBOURS = {"rotate_half": "rotate_neighbours"}
_PAIRS = {"rotate_half": "rotate_pairs"}  # the same in other words
_POSITIONS = {"sin, unsqueeze_dim": "sin, position_ids=None, unsqueeze_dim"}  # that nobody reads
_CAST_BACK = {  # where cos and sin are in float32
    "    cos = ": "    q_type, k_type = q.dtype, k.dtype\n    cos = ",
    "return q_embed, k_embed": "return q_embed.to(q_type), k_embed.to(k_type)",
}
_AT_ONCE = {  # in one expression each
    "    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)\n": "",
    "    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)\n": "",
    "[q_embed": "[(q_rot * cos) + (rotate_half(q_rot) * sin)",
    "[k_embed": "[(k_rot * cos) + (rotate_half(k_rot) * sin)",
}
_NEW_NAMES = {  # where others assign to q_embed and k_embed twice
    "q_rot": "q",
    "k_rot": "k",
    "    q_embed = torch.cat([q_embed, q_pass], dim=-1)\n": "",
    "    k_embed = torch.cat([k_embed, k_pass], dim=-1)\n": "",
    "return q_embed, k_embed": "return torch.cat((q_embed, q_pass), dim=-1), torch.cat((k_embed, k_pass), dim=-1)",
}
_UNBATCHED = {"[None, :, None, :]": "[:, None, :]"}  # q and k are [S, N, D]
_LAST_QUERIES = {  # q is of the last positions, and k of all
    "    q_embed = (q * cos)": "    q_len = q.size(-2)\n    q_embed = (q * cos[..., -q_len:, :])",
    "(rotate_half(q) * sin)": "(rotate_half(q) * sin[..., -q_len:, :])",
}
_IN_FLOAT32 = {  # cos and sin too; k gets the dtype of q
    "    cos = ": "    origin_dtype = q.dtype\n    q, k = q.float(), k.float()\n    cos = ",
    "unsqueeze(unsqueeze_dim)": "unsqueeze(unsqueeze_dim).float()",
    "return q_embed, k_embed": "return q_embed.to(origin_dtype), k_embed.to(origin_dtype)",
}
_TENSORS_IN_FLOAT32 = {  # without cos and sin; k gets the dtype of q
    "    cos = ": "    dtype = q.dtype\n    q = q.float()\n    k = k.float()\n    cos = ",
    "return q_embed, k_embed": "return q_embed.to(dtype=dtype), k_embed.to(dtype=dtype)",
}
_HALVES = {  # by cos and sin that are half as wide as a head
    "(q * cos) + (rotate_half(q) * sin)": "_apply_halves(q, cos, sin)",
    "(k * cos) + (rotate_half(k) * sin)": "_apply_halves(k, cos, sin)",
}
_HALF_WIDTH = {"_apply_halves": "_apply_neighbours"}
_REPEATED = {  # the angles are in the first half of cos and sin
    "sin = sin.unsqueeze(unsqueeze_dim)\n": """sin = sin.unsqueeze(unsqueeze_dim)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
"""
}
_CAST_BEHIND = {"(q.float())": "(q).float()", "(k.float())": "(k).float()"}  # the helper
gpt_oss = reworded("gpt_oss", llama, _HALVES)
ernie4_5_vl_moe = reworded("ernie4_5_vl_moe", modernbert, _PAIRS | _CAST_BEHIND)

PATTERNS = (
    Pattern(llama, ("RotaryPosEmb",)),
    Pattern(reworded("nanochat", llama, {"rotate_half": "rotate_half_reversed"}), ("RotaryPosEmbReversed",)),
    Pattern(reworded("blt", llama, _NEIGHBOURS), ("RotaryPosEmbInterleaved",)),
    Pattern(reworded("helium", llama, _PAIRS | _REPEATED), ("RotaryPosEmbInterleavedRepeated",)),
    Pattern(reworded("olmo", llama, _CAST_BACK), ("RotaryPosEmbCastBack",)),
    Pattern(reworded("muse_glimmer_assistant", llama, _LAST_QUERIES), ("RotaryPosEmbLastQueries",)),
    Pattern(modernbert, ("RotaryPosEmbFloat32",)),
    Pattern(ernie4_5_vl_moe, ("RotaryPosEmbInterleavedFloat32",)),
    Pattern(reworded("ernie4_5", ernie4_5_vl_moe, _REPEATED), ("RotaryPosEmbInterleavedRepeatedFloat32",)),
    Pattern(reworded("cohere", llama, _NEIGHBOURS | _TENSORS_IN_FLOAT32), ("RotaryPosEmbInterleavedFloat32",)),
    Pattern(deepseek_v4, ("RotaryPosEmbInterleavedTail",)),
    Pattern(reworded("hunyuan_vl", llama, _IN_FLOAT32), ("RotaryPosEmbTablesInFloat32",)),
    Pattern(gpt_oss, ("RotaryPosEmbHalfWidth",)),
    Pattern(reworded("openai_privacy_filter", gpt_oss, _HALF_WIDTH), ("RotaryPosEmbInterleavedHalfWidth",)),
    Pattern(gemma4, ("RotaryPosEmbSingle",)),
    Pattern(qwen2_vl_multimodal, ("MultimodalRotaryPosEmb",)),
    Pattern(gpt_neox, ("RotaryPosEmbPartial",)),
    Pattern(reworded("glmasr", gpt_neox, _POSITIONS), ("RotaryPosEmbPartialPositions",)),
    Pattern(reworded("glm4", gpt_neox, _PAIRS | _REPEATED), ("RotaryPosEmbInterleavedRepeatedPartial",)),
    Pattern(reworded("glm4v", gpt_neox, _PAIRS), ("RotaryPosEmbInterleavedPartial",)),
    Pattern(reworded("phi3", gpt_neox, _AT_ONCE), ("RotaryPosEmbPartial",)),
    Pattern(reworded("nemotron", gpt_neox, _NEW_NAMES), ("RotaryPosEmbPartial",)),
    Pattern(qwen4_exp, ("RotaryPosEmbPartialOptionalKey",)),
    Pattern(qwen2_vl_vision, ("VisionRotaryPosEmb",)),
    Pattern(minimax_m3_vl_vision, ("VisionRotaryPosEmbPartial",)),
    Pattern(reworded("minimax_m3_vl_tower", minimax_m3_vl_vision, _UNBATCHED), ("VisionRotaryPosEmbPartial",)),
    Pattern(dinov3_vit, ("RotaryPosEmbPatches",)),
)
