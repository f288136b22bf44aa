"""The rotary functions of transformers that rotate pairs of neighbours in a head; rotate_halves.py has the others.

q and k are ``[B, N, S, D]``, or ``[B, S, N, D]`` with another unsqueeze_dim; cos and sin ``[B, S, D]``. Docstrings say
in what a function differs from these shapes, and from others with the same parameters.
"""

import torch

from kernels_ext_npu.patterns.pattern import FunctionPattern
from kernels_ext_npu.patterns.rotary.rotate_halves import gpt_neox, gpt_oss, llama, modernbert
from kernels_ext_npu.patterns.variant import variant

# what makes a function that rotates halves one that rotates neighbours: transformers has several such helpers
_NEIGHBOURS = {"rotate_half": "rotate_neighbours"}
_PAIRS = {"rotate_half": "rotate_pairs"}
# what takes the angles from the first half of cos and sin
_REPEATED = {
    "sin = sin.unsqueeze(unsqueeze_dim)\n": """sin = sin.unsqueeze(unsqueeze_dim)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
"""
}


def rotate_pairs(x):
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def rotate_neighbours(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack([-x2, x1], dim=-1).flatten(-2)


def rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(-2)


def rotate_pairwise(x):
    x = x.view(*x.shape[:-1], -1, 2)
    x1, x2 = x.unbind(dim=-1)
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(start_dim=-2)


@variant(_NEIGHBOURS, of=llama)
def blt():
    """Rotate as Llama does, but neighbours against each other: only the helper differs."""


def cohere(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate in float32; k gets the dtype of q."""
    dtype = q.dtype
    q = q.float()
    k = k.float()
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_neighbours(q) * sin)
    k_embed = (k * cos) + (rotate_neighbours(k) * sin)
    return q_embed.to(dtype=dtype), k_embed.to(dtype=dtype)


@variant(_PAIRS | {"(q.float())": "(q).float()", "(k.float())": "(k).float()"}, of=modernbert)
def ernie4_5_vl_moe():
    """Rotate in float32, cast after the helper; k gets the dtype of q."""


@variant(_REPEATED, of=ernie4_5_vl_moe)
def ernie4_5():
    """Rotate as Ernie 4.5 VL does, with the angles in the first half of cos and sin."""


@variant(_PAIRS | _REPEATED, of=llama)
def helium():
    """Rotate as Llama does, but neighbours, with the angles in the first half of cos and sin."""


@variant(_PAIRS | _REPEATED, of=gpt_neox)
def glm4():
    """Rotate the first part of a head, with the angles in the first half of cos and sin."""


@variant(_PAIRS, of=gpt_neox)
def glm4v():
    """Rotate the first part of a head as GPT-NeoX does, but neighbours against each other: only the helper differs."""


def _apply_neighbours(x, cos, sin):
    first_half, second_half = x[..., ::2], x[..., 1::2]
    first_ = first_half * cos - second_half * sin
    second_ = second_half * cos + first_half * sin
    return torch.stack((first_, second_), dim=-1).flatten(-2)


@variant({"_apply_halves": "_apply_neighbours"}, of=gpt_oss)
def openai_privacy_filter():
    """Rotate as gpt-oss does, by cos and sin half as wide as a head, but neighbours: only the helper differs."""


def deepseek_v4(x, cos, sin, unsqueeze_dim=1):
    """Rotate the tail of each head of one tensor, in float32; cos and sin are half as wide as the tail."""
    cos = cos.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    sin = sin.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    rope_dim = cos.shape[-1]
    nope, rope = x[..., :-rope_dim], x[..., -rope_dim:]
    rotated = ((rope.float() * cos) + (rotate_pairs(rope).float() * sin)).to(x.dtype)
    return torch.cat([nope, rotated], dim=-1)


def gptj(tensor, sin, cos):
    """Rotate one tensor ``[B, S, N, D]``; sin comes before cos, and both are half as wide."""
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return (tensor * cos) + (rotate_every_two(tensor) * sin)


def sam3(q, k, cos, sin):
    """Rotate in float32, by cos and sin that need no unsqueeze; q and k keep their dtypes."""
    q_embed = q.float()
    q_embed = (q_embed * cos) + (rotate_pairwise(q_embed) * sin)
    k_embed = k.float()
    k_embed = (k_embed * cos) + (rotate_pairwise(k_embed) * sin)
    return q_embed.type_as(q), k_embed.type_as(k)


def deepseek_v3(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """Rotate neighbours, and give them as halves of the head; the angles are in the first half of cos and sin."""
    cos = cos[..., : cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    sin = sin[..., : sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    q1, q2 = q[..., 0::2], q[..., 1::2]
    k1, k2 = k[..., 0::2], k[..., 1::2]
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    return q_embed, k_embed


def mistral_large4(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate as DeepSeek-V3 does, where there may be no k."""
    cos = cos[..., : cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    sin = sin[..., : sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    q1, q2 = q[..., 0::2], q[..., 1::2]
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    if k is not None:
        k1, k2 = k[..., 0::2], k[..., 1::2]
        k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    else:
        k_embed = None
    return q_embed, k_embed


# ---- complex numbers -------------------------------------------------------------------------------------------------
def deepseek_v2(xq, xk, freqs_cis):
    """Rotate neighbours as complex numbers, in float32; the factors are ``[B, S, D/2]``."""
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.unsqueeze(1).to(xq_.device)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3).type_as(xq)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3).type_as(xk)
    return xq_out, xk_out


def llama4(xq, xk, freqs_cis):
    """Rotate as DeepSeek-V2 does, for q and k ``[B, S, N, D]``."""
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    xq_out = torch.view_as_real(xq_ * freqs_cis[:, :, None, :]).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis[:, :, None, :]).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def _reshape_for_broadcast(freqs_ci, query):
    ndim = query.ndim
    shape = [d if i == 1 or i == ndim - 1 else 1 for i, d in enumerate(query.shape)]
    return freqs_ci.view(*shape)


def llama4_vision(query, key, freqs_ci):
    """Rotate as Llama 4 does, by factors of the positions of one image, whose last dimension is D/2."""
    query_ = torch.view_as_complex(query.float().reshape(*query.shape[:-1], -1, 2))
    key_ = torch.view_as_complex(key.float().reshape(*key.shape[:-1], -1, 2))
    freqs_ci = _reshape_for_broadcast(freqs_ci=freqs_ci, query=query_)
    freqs_ci = freqs_ci.to(query_.device)
    query_out = torch.view_as_real(query_ * freqs_ci).flatten(3)
    key_out = torch.view_as_real(key_ * freqs_ci).flatten(3)
    return query_out.type_as(query), key_out.type_as(key)


PATTERNS = (
    FunctionPattern(blt, "RotaryPosEmbInterleaved"),
    FunctionPattern(cohere, "RotaryPosEmbInterleavedFloat32"),
    FunctionPattern(ernie4_5_vl_moe, "RotaryPosEmbInterleavedFloat32"),
    FunctionPattern(ernie4_5, "RotaryPosEmbInterleavedRepeatedFloat32"),
    FunctionPattern(helium, "RotaryPosEmbInterleavedRepeated"),
    FunctionPattern(glm4, "RotaryPosEmbInterleavedRepeatedPartial"),
    FunctionPattern(glm4v, "RotaryPosEmbInterleavedPartial"),
    FunctionPattern(openai_privacy_filter, "RotaryPosEmbInterleavedHalfWidth"),
    FunctionPattern(deepseek_v4, "RotaryPosEmbInterleavedTail"),
    FunctionPattern(gptj, "RotaryPosEmbEveryTwo"),
    FunctionPattern(sam3, "RotaryPosEmbPairwise"),
    FunctionPattern(deepseek_v2, "RotaryEmbComplex"),
    FunctionPattern(llama4, "RotaryEmbComplexBySequence"),
    FunctionPattern(llama4_vision, "VisionRotaryEmbComplex"),
    FunctionPattern(deepseek_v3, "RotaryPosEmbDeinterleaved"),
    FunctionPattern(mistral_large4, "RotaryPosEmbDeinterleavedOptionalKey"),
)
