"""The rotary functions of transformers that rotate neighbours in a form of their own; rotations.py has the others.

q and k are ``[B, N, S, D]``, or ``[B, S, N, D]`` with another unsqueeze_dim; cos and sin ``[B, S, D]``. Docstrings say
in what a function differs from these shapes, and from others with the same parameters.
"""

import torch

from kernels_ext_npu.patterns.pattern import Pattern


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


def rotate_channel_pairs(x):
    x = x.view(*x.shape[:-1], -1, 2)
    x1, x2 = x.unbind(dim=-1)
    return torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)


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


def inkling2_vision(q, k, cos, sin):
    """Rotate q and k ``[..., S, N, D]`` in float32, by cos and sin ``[S, D]``; both keep their dtypes."""
    orig_q_dtype = q.dtype
    orig_k_dtype = k.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_embed = (q * cos) + (rotate_channel_pairs(q) * sin)
    k_embed = (k * cos) + (rotate_channel_pairs(k) * sin)
    return q_embed.to(orig_q_dtype), k_embed.to(orig_k_dtype)


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
    Pattern(gptj, ("RotaryPosEmbEveryTwo",)),
    Pattern(sam3, ("RotaryPosEmbPairwise",)),
    Pattern(inkling2_vision, ("VisionRotaryPosEmbPairwise",)),
    Pattern(deepseek_v2, ("RotaryEmbComplex",)),
    Pattern(llama4, ("RotaryEmbComplexBySequence",)),
    Pattern(llama4_vision, ("VisionRotaryEmbComplex",)),
    Pattern(deepseek_v3, ("RotaryPosEmbDeinterleaved",)),
    Pattern(mistral_large4, ("RotaryPosEmbDeinterleavedOptionalKey",)),
)
