"""The rotary functions of transformers that rotate the halves of a head, or of a part of it, against each other.

q and k are ``[B, N, S, D]``, or ``[B, S, N, D]`` with another unsqueeze_dim; cos and sin ``[B, S, D]``. Docstrings say
in what a function differs from these shapes, and from others with the same parameters. rotate_neighbours.py has those
that rotate pairs of neighbours.
"""

import torch

from kernels_ext_npu.patterns.pattern import FunctionPattern
from kernels_ext_npu.patterns.variant import variant


# ---- halves of a head against each other -----------------------------------------------------------------------------
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_half_reversed(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, -x1), dim=-1)


def llama(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


@variant({"rotate_half": "rotate_half_reversed"}, of=llama)
def nanochat():
    """Rotate by the negative angle: the helper has the other sign."""


def olmo(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate by cos and sin in float32, and cast back to the dtypes of q and k."""
    q_type, k_type = q.dtype, k.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(q_type), k_embed.to(k_type)


def modernbert(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate in float32; k gets the dtype of q."""
    original_dtype = q.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
    k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
    return q_embed.to(original_dtype), k_embed.to(original_dtype)


def hunyuan_vl(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate in float32, to which cos and sin are cast too; k gets the dtype of q."""
    origin_dtype = q.dtype
    q, k = q.float(), k.float()
    cos = cos.unsqueeze(unsqueeze_dim).float()
    sin = sin.unsqueeze(unsqueeze_dim).float()
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(origin_dtype), k_embed.to(origin_dtype)


def _apply_halves(x, cos, sin):
    first_half, second_half = torch.chunk(x, 2, dim=-1)
    first_ = first_half * cos - second_half * sin
    second_ = second_half * cos + first_half * sin
    return torch.cat((first_, second_), dim=-1)


def gpt_oss(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate by cos and sin that are half as wide as a head."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = _apply_halves(q, cos, sin)
    k_embed = _apply_halves(k, cos, sin)
    return q_embed, k_embed


def gemma4(x, cos, sin, unsqueeze_dim=1):
    """Rotate one tensor, in place of q and k."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return (x * cos) + (rotate_half(x) * sin)


def muse_glimmer_assistant(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate q by the last positions, which are its own, and k by all of them."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_len = q.size(-2)
    q_embed = (q * cos[..., -q_len:, :]) + (rotate_half(q) * sin[..., -q_len:, :])
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def qwen2_vl_multimodal(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """Compose cos and sin of time, height and width, as embeddings do by now, and rotate by them."""
    mrope_section = mrope_section * 2
    cos = torch.cat([m[i % 3] for i, m in enumerate(cos.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    sin = torch.cat([m[i % 3] for i, m in enumerate(sin.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


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


@variant({"sin, unsqueeze_dim": "sin, position_ids=None, unsqueeze_dim"}, of=gpt_neox)
def glmasr():
    """Rotate as GPT-NeoX does, with positions that nobody reads."""


def phi3(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
    k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
    return q_embed, k_embed


def nemotron(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rot_dim = cos.shape[-1]
    q, q_pass = q[..., :rot_dim], q[..., rot_dim:]
    k, k_pass = k[..., :rot_dim], k[..., rot_dim:]
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return torch.cat((q_embed, q_pass), dim=-1), torch.cat((k_embed, k_pass), dim=-1)


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


PATTERNS = (
    FunctionPattern(llama, "RotaryPosEmb"),
    FunctionPattern(nanochat, "RotaryPosEmbReversed"),
    FunctionPattern(olmo, "RotaryPosEmbCastBack"),
    FunctionPattern(modernbert, "RotaryPosEmbFloat32"),
    FunctionPattern(hunyuan_vl, "RotaryPosEmbTablesInFloat32"),
    FunctionPattern(gpt_oss, "RotaryPosEmbHalfWidth"),
    FunctionPattern(gemma4, "RotaryPosEmbSingle"),
    FunctionPattern(muse_glimmer_assistant, "RotaryPosEmbLastQueries"),
    FunctionPattern(qwen2_vl_multimodal, "MultimodalRotaryPosEmb"),
    FunctionPattern(gpt_neox, "RotaryPosEmbPartial"),
    FunctionPattern(glmasr, "RotaryPosEmbPartialPositions"),
    FunctionPattern(phi3, "RotaryPosEmbPartial"),
    FunctionPattern(nemotron, "RotaryPosEmbPartial"),
    FunctionPattern(qwen4_exp, "RotaryPosEmbPartialOptionalKey"),
    FunctionPattern(qwen2_vl_vision, "VisionRotaryPosEmb"),
    FunctionPattern(minimax_m3_vl_vision, "VisionRotaryPosEmbPartial"),
    FunctionPattern(dinov3_vit, "RotaryPosEmbPatches"),
)
