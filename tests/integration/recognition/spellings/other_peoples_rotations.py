"""Rotary functions as other people spell them, and functions that only look like one."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

B, N, M, S, T, D = 2, 8, 4, 6, 20, 64


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_old_llama(q, k, cos, sin, position_ids):
    cos = cos.squeeze(1).squeeze(0)
    sin = sin.squeeze(1).squeeze(0)
    cos = cos[position_ids].unsqueeze(1)
    sin = sin[position_ids].unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def apply_rotary_llama(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    cos = cos[position_ids].unsqueeze(unsqueeze_dim)
    sin = sin[position_ids].unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def apply_rotary_without_positions(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    """Takes positions, as other models give them to it, and reads none."""
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    results = [(x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (q, k)]
    return results[0], results[1]


def apply_rope_by_positions(x, positions, max_wavelength=10_000):
    """Makes the angles of its positions itself."""
    half = x.shape[-1] // 2
    timescale = max_wavelength ** ((2.0 / x.shape[-1]) * torch.arange(half, dtype=torch.float32, device=x.device))
    radians = (positions[..., None].float() / timescale[None, None, :])[..., None, :]
    first, second = x.float().split(half, dim=-1)
    cos, sin = radians.cos(), radians.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rope_by_frequencies(t, inv_freq, *, interleaved: bool = False):
    """Makes the angles of all positions itself, as TabPFN does."""
    angles = torch.arange(t.shape[-2], device=t.device, dtype=inv_freq.dtype)[:, None] * inv_freq
    if interleaved:
        return apply_rotary_timm(t, torch.cat((angles.sin(), angles.cos()), -1).repeat_interleave(2, -1))
    return rotary_with_angles_first(torch.cat((angles, angles), -1), t).to(t.dtype)


def apply_rotary_baichuan(q, k, cos_, sin_, position_ids):
    cos = cos_.squeeze(1).squeeze(0)
    sin = sin_.squeeze(1).squeeze(0)
    cos = cos[position_ids].unsqueeze(1)
    sin = sin[position_ids].unsqueeze(1)
    q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
    k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
    return q_embed.to(q.dtype), k_embed.to(k.dtype)


def reshape_for_broadcast(freqs_cis, x):
    ndim = x.ndim
    assert 0 <= 1 < ndim
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    shape = [d if i == 1 or i == ndim - 1 else 1 for i, d in enumerate(x.shape)]
    return freqs_cis.view(*shape)


def apply_rotary_meta(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = reshape_for_broadcast(freqs_cis, xq_)
    return torch.view_as_real(xq_ * freqs_cis).flatten(3).type_as(xq), torch.view_as_real(xk_ * freqs_cis).flatten(
        3
    ).type_as(xk)


def apply_rope_kimi(xq, xk, freqs_cis):
    freqs_cis = freqs_cis.unsqueeze(-2)
    xq_ = torch.view_as_complex(xq.float().view(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().view(*xk.shape[:-1], -1, 2))
    return torch.view_as_real(xq_ * freqs_cis).flatten(-2).type_as(xq), torch.view_as_real(xk_ * freqs_cis).flatten(
        -2
    ).type_as(xk)


def check_rope(x, freqs_cis):
    assert x.ndim == freqs_cis.ndim + 1, (x.shape, freqs_cis.shape)
    assert x.shape[:-2] == freqs_cis.shape[:-1], (x.shape, freqs_cis.shape)
    assert freqs_cis.dtype == torch.complex64, freqs_cis.dtype


def apply_rope_checking(xq, xk, freqs_cis):
    """Take no other complex numbers than those of float32, as the vision tower of Kimi-VL does."""
    check_rope(xq, freqs_cis)
    check_rope(xk, freqs_cis)
    return apply_rope_kimi(xq, xk, freqs_cis)


def apply_rope_litgpt(x, cos, sin):
    head_size = x.size(-1)
    x1 = x[..., : head_size // 2]
    x2 = x[..., head_size // 2 :]
    rotated = torch.cat((-x2, x1), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.to(dtype=x.dtype)


@torch.jit.script
def apply_rotary_chatglm(x, rope_cache):
    sq, np = x.size(0), x.size(2)
    rot_dim = rope_cache.shape[-2] * 2
    x, x_pass = x[..., :rot_dim], x[..., rot_dim:]
    rope_cache = rope_cache[:sq]
    xshaped = x.reshape(sq, -1, np, rot_dim // 2, 2)
    rope_cache = rope_cache.view(sq, -1, 1, xshaped.size(3), 2)
    x_out2 = torch.stack(
        [
            xshaped[..., 0] * rope_cache[..., 0] - xshaped[..., 1] * rope_cache[..., 1],
            xshaped[..., 1] * rope_cache[..., 0] + xshaped[..., 0] * rope_cache[..., 1],
        ],
        -1,
    )
    x_out2 = x_out2.flatten(3)
    return torch.cat((x_out2, x_pass), dim=-1)


def apply_rotary_gptfast(x, freqs_cis):
    xshaped = x.float().reshape(*x.shape[:-1], -1, 2)
    freqs_cis = freqs_cis.view(1, xshaped.size(1), 1, xshaped.size(3), 2)
    x_out2 = torch.stack(
        [
            xshaped[..., 0] * freqs_cis[..., 0] - xshaped[..., 1] * freqs_cis[..., 1],
            xshaped[..., 1] * freqs_cis[..., 0] + xshaped[..., 0] * freqs_cis[..., 1],
        ],
        -1,
    )
    return x_out2.flatten(3).type_as(x)


def apply_rotary_nanochat(x, cos, sin):
    assert x.ndim == 4
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    y1 = x1 * cos + x2 * sin
    y2 = x1 * (-sin) + x2 * cos
    return torch.cat([y1, y2], 3).to(x.dtype)


def apply_rotary_qwen_vision(tensor, freqs):
    orig_dtype = tensor.dtype
    tensor = tensor.float()
    cos, sin = freqs.cos(), freqs.sin()
    cos = cos.unsqueeze(1).repeat(1, 1, 2).unsqueeze(0).float()
    sin = sin.unsqueeze(1).repeat(1, 1, 2).unsqueeze(0).float()
    return ((tensor * cos) + (rotate_half(tensor) * sin)).to(orig_dtype)


def apply_rotary_qwen(t, freqs):
    cos, sin = freqs
    t_float = t.float()
    rot_dim = cos.shape[-1]
    t_, t_pass = t_float[..., :rot_dim], t_float[..., rot_dim:]
    t_ = (t_ * cos) + (rotate_half(t_) * sin)
    return torch.cat((t_, t_pass), dim=-1).type_as(t)


def apply_rope_flux(xq, xk, freqs_cis):
    xq_ = xq.float().reshape(*xq.shape[:-1], -1, 1, 2)
    xk_ = xk.float().reshape(*xk.shape[:-1], -1, 1, 2)
    xq_out = freqs_cis[..., 0] * xq_[..., 0] + freqs_cis[..., 1] * xq_[..., 1]
    xk_out = freqs_cis[..., 0] * xk_[..., 0] + freqs_cis[..., 1] * xk_[..., 1]
    return xq_out.reshape(*xq.shape).type_as(xq), xk_out.reshape(*xk.shape).type_as(xk)


def apply_rotary_deepseek(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    cos = cos[position_ids].unsqueeze(unsqueeze_dim)
    sin = sin[position_ids].unsqueeze(unsqueeze_dim)
    b, h, s, d = q.shape
    q = q.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    b, h, s, d = k.shape
    k = k.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def apply_rotary_neox(q, k, cos, sin, offset=0):
    cos = cos[..., offset : q.shape[-2] + offset, :]
    sin = sin[..., offset : q.shape[-2] + offset, :]
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def apply_rotary_flash(x, cos, sin, interleaved=False):
    ro_dim = cos.shape[-1] * 2
    cos = cos.repeat(1, 2)[:, None] if not interleaved else cos.repeat_interleave(2, -1)[:, None]
    sin = sin.repeat(1, 2)[:, None] if not interleaved else sin.repeat_interleave(2, -1)[:, None]
    return torch.cat([x[..., :ro_dim] * cos + rotate_half(x[..., :ro_dim]) * sin, x[..., ro_dim:]], dim=-1)


def apply_rotary_diffusers(x, freqs_cis, use_real=True, use_real_unbind_dim=-1):
    if use_real:
        cos, sin = freqs_cis
        cos = cos[None, None]
        sin = sin[None, None]
        cos, sin = cos.to(x.device), sin.to(x.device)
        if use_real_unbind_dim == -1:
            x_real, x_imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
            x_rotated = torch.stack([-x_imag, x_real], dim=-1).flatten(3)
        else:
            x_real, x_imag = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
            x_rotated = torch.cat([-x_imag, x_real], dim=-1)
        return (x.float() * cos + x_rotated.float() * sin).to(x.dtype)
    x_rotated = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x_rotated * freqs_cis.unsqueeze(2)).flatten(3).type_as(x)


def apply_rotary_timm(x, emb):
    sin_emb, cos_emb = emb.chunk(2, -1)
    rot = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * cos_emb + rot * sin_emb


def apply_rot_embed(x, emb, half=False):
    sin_emb, cos_emb = emb.chunk(2, -1)
    if half:
        return x * cos_emb + rotate_half(x) * sin_emb
    return apply_rotary_timm(x, emb)


def apply_rope_to_both(q, k, cos, sin):
    return apply_rope_litgpt(q, cos, sin), apply_rope_litgpt(k, cos, sin)


def rotate_by_einops(x):
    x1, x2 = rearrange(x, "... (j d) -> ... j d", j=2).unbind(dim=-2)
    return torch.cat((-x2, x1), dim=-1)


def rotary_with_angles_first(pos, t):
    return (t * pos.cos()) + (rotate_by_einops(t) * pos.sin())


@torch.autocast("cuda", enabled=False)
def apply_rotary_without_autocast(t, freqs, scale=1):
    rotated, passed = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    rotated = rotated * freqs.cos() * scale + rotate_by_einops(rotated) * freqs.sin() * scale
    return torch.cat((rotated, passed), dim=-1)


def apply_rope_of_as_many_heads(xq, xk, freqs_cis):
    freqs_cis = freqs_cis.unsqueeze(-2)
    xq_ = torch.view_as_complex(xq.float().view(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().view(*xq.shape[:-1], -1, 2))
    xq_out, xk_out = (torch.view_as_real(x * freqs_cis).flatten(-2) for x in (xq_, xk_))
    return xq_out.type_as(xq), xk_out.type_as(xk)


def apply_rotary_in_parts(q, cos, sin):
    o = torch.empty_like(q)
    h = q.shape[-1] // 2
    o[..., :h] = q[..., :h] * cos - q[..., h:] * sin
    o[..., h:] = q[..., h:] * cos + q[..., :h] * sin
    return o


def apply_rotary_along(xq, xk, seq_dim: int, freqs_cis):
    """Is told the dimension of the positions, as in Meta's lingua."""
    pairs = [x.reshape(*x.shape[:-1], -1, 1, 2) for x in (xq, xk)]
    shape = [d if i in (seq_dim, xq.ndim - 1) else 1 for i, d in enumerate(pairs[0].shape[:-2])]
    freqs_cis = freqs_cis.view(*shape, 2, 2).float()
    return tuple((each * freqs_cis).sum(5).flatten(3).type_as(xq) for each in pairs)


def apply_rotary_with_options(x, cos, sin, **kwargs):
    return apply_rope_litgpt(x, cos, sin)


def apply_rope_by_embedding(tokens, positions, cos_comp, sin_comp):
    """Looks rows up as an embedding does, by positions that come first, as VGGT and CroCo do."""
    cos, sin = (F.embedding(positions, each)[:, None] for each in (cos_comp, sin_comp))
    return tokens * cos + rotate_half(tokens) * sin


def apply_rotary_pos_emb_index(q, k, cos, sin, position_id):
    """Has positions in front of sequences, as ChatGLM does."""
    cos, sin = (F.embedding(position_id, each.squeeze(1)).unsqueeze(2) for each in (cos, sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@torch.compile(backend="eager")
def apply_rotary_compiled(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_splitting(q, k, cos, sin):
    """Leave what lies behind the width of the tables as it is."""
    rotated, rest = zip(*(x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1) for x in (q, k)))
    q, k = (torch.cat((x * cos + rotate_half(x) * sin, y), dim=-1) for x, y in zip(rotated, rest))
    return q, k


def apply_rotary_einsum(q, k, cos, sin):
    def t(x):
        a, b = torch.chunk(x, 2, dim=-1)
        return torch.cat(
            [
                torch.einsum("bnsd,sd->bnsd", a, cos) - torch.einsum("bnsd,sd->bnsd", b, sin),
                torch.einsum("bnsd,sd->bnsd", a, sin) + torch.einsum("bnsd,sd->bnsd", b, cos),
            ],
            -1,
        )

    return t(q), t(k)


def apply_rope_by_polar(x, angles):
    """Turns complex numbers by angles."""
    units = torch.polar(torch.ones_like(angles, dtype=torch.float32), angles.float())
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * units
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def apply_rotary_addcmul(q, k, cos, sin):
    return torch.addcmul(q * cos, rotate_half(q), sin), torch.addcmul(k * cos, rotate_half(k), sin)


def rot(x, freqs):
    """Has the shortest of names."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs.unsqueeze(0).unsqueeze(2)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def apply_rotary_signed(x, cos, sin):
    sign = torch.ones_like(cos)
    sign[..., : x.shape[-1] // 2] = -1
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sign * sin


# ---- what only looks like one


def apply_rotary_by_length(q, k, cos, sin):
    if q.shape[-2] > 100:
        cos = cos * 0.5
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_first_token(x, cos, sin):
    if x.shape[-2] == 1:
        return x
    return x * cos + rotate_half(x) * sin


def apply_rotary_dropped(x, cos, sin):
    return torch.nn.functional.dropout(x * cos + rotate_half(x) * sin, 0.1)


def apply_rotary_on_the_host(x, cos, sin):
    scale = 1.0 if cos.sum().item() < 1e9 else 0.5
    return scale * (x * cos + rotate_half(x) * sin)


def apply_rotary_clamped(x, cos, sin):
    return (x * cos + rotate_half(x) * sin).clamp(-1e3, 1e3)


def apply_rotary_normed(x, cos, sin):
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x * cos + rotate_half(x) * sin


def apply_rotary_from_cache(x, cos, sin):
    return (x * cos + rotate_half(x) * sin).abs()


def apply_rotary_shifted(x, cos, sin):
    return x * cos + rotate_half(x) * sin + 1e-2


def apply_rotary_mirrored(x, cos, sin):
    return x * cos + x.flip(-1) * sin


def apply_rotary_query_alone(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k


def apply_rotary_writing(x, cos, sin):
    x.mul_(cos).add_(rotate_half(x) * sin)
    return x


def apply_rotary_detached(x, cos, sin):
    return x * cos + rotate_half(x.detach()) * sin


def apply_rotary_halved_gradient(x, cos, sin):
    turned = x * cos + rotate_half(x) * sin
    return 0.5 * turned + 0.5 * turned.detach()


def apply_rotary_in_float16(x, cos, sin):
    x = x.half()
    return x * cos.half() + rotate_half(x) * sin.half()


def apply_rotary_other_partner(x, cos, sin):
    return x * cos + x.roll(1, -1) * sin


def apply_rotary_by_option(x, cos, sin, **options):
    return x * cos + rotate_half(x) * sin * options.get("scale", 1)


def apply_rotary_scale_only(x, cos, sin):
    return x * (cos + sin)


STATE = [1.0]


def apply_rotary_with_state(x, cos, sin):
    STATE[0] += 1
    return STATE[0] * (x * cos + rotate_half(x) * sin)


def apply_rotary_counting(x, cos, sin):
    global COUNT
    COUNT = 1
    return x * cos + rotate_half(x) * sin


def apply_rotary_with_a_cache(x, cos, sin, cache={}):  # noqa: B006  as some keep what they have made
    return x * cache.setdefault("cos", cos) + rotate_half(x) * sin


def apply_rotary_printing(x, cos, sin):
    print("rotated")
    return x * cos + rotate_half(x) * sin


def apply_rotary_long_training(x, cos, sin):
    if torch.is_grad_enabled():
        return x * cos + rotate_half(x) * sin
    return x * cos - rotate_half(x) * sin


def table(*shape: int) -> Tensor:
    return torch.randn(shape)


def heads(count: int, first: bool = True) -> Tensor:
    x = torch.randn(B, count, S, D)
    return x if first else x.transpose(1, 2).contiguous()


def units(*shape: int) -> Tensor:
    return torch.polar(torch.ones(shape), torch.randn(shape))


# name -> the layer, and what makes arguments
SERVED = {
    "apply_rotary_old_llama": ("RotaryPosEmb", lambda: (*_qk(), table(1, 1, T, D), table(1, 1, T, D), _positions())),
    "apply_rotary_llama": ("RotaryPosEmb", lambda: (*_qk(), table(T, D), table(T, D), _positions())),
    "apply_rotary_without_positions": ("RotaryPosEmb", lambda: (*_qk(), table(B, S, D), table(B, S, D), _positions())),
    "apply_rope_by_positions": ("RotaryPosEmb", lambda: (heads(N, False), _positions())),
    "apply_rope_by_frequencies": ("RotaryPosEmb", lambda: (heads(N), table(D // 2))),
    "apply_rotary_baichuan": ("RotaryPosEmb", lambda: (*_qk(), table(1, 1, T, D), table(1, 1, T, D), _positions())),
    "apply_rotary_meta": ("RotaryPosEmbInterleaved", lambda: (*_qk(False), units(S, D // 2))),
    "apply_rope_kimi": ("RotaryPosEmbInterleaved", lambda: (*(x[0] for x in _qk(False)), units(S, D // 2))),
    "apply_rope_checking": ("RotaryPosEmbInterleaved", lambda: (*(x[0] for x in _qk(False)), units(S, D // 2))),
    "apply_rope_litgpt": ("RotaryPosEmb", lambda: (heads(N), table(S, D), table(S, D))),
    "apply_rotary_chatglm": (
        "RotaryPosEmbInterleaved",
        lambda: (heads(N).permute(2, 0, 1, 3).contiguous(), table(S, 1, D // 4, 2)),
    ),
    "apply_rotary_gptfast": ("RotaryPosEmbInterleaved", lambda: (heads(N, False), table(S, D // 2, 2))),
    "apply_rotary_nanochat": (
        "RotaryPosEmb",
        lambda: (heads(N, False), table(1, S, 1, D // 2), table(1, S, 1, D // 2)),
    ),
    "apply_rotary_qwen_vision": ("RotaryPosEmb", lambda: (heads(N, False)[:1], table(S, D // 2))),
    "apply_rotary_qwen": ("RotaryPosEmb", lambda: (heads(N, False), (table(1, S, 1, D // 2), table(1, S, 1, D // 2)))),
    "apply_rope_flux": ("RotaryPosEmbInterleaved", lambda: (*_qk(), table(1, 1, S, D // 2, 2, 2))),
    "apply_rotary_deepseek": ("RotaryPosEmbDeinterleaved", lambda: (*_qk(), table(T, D), table(T, D), _positions())),
    "apply_rotary_neox": ("RotaryPosEmb", lambda: (*_qk(), table(1, 1, T, D), table(1, 1, T, D))),
    "apply_rotary_flash": ("RotaryPosEmb", lambda: (heads(N, False), table(S, D // 4), table(S, D // 4))),
    "apply_rotary_diffusers": ("RotaryPosEmbInterleaved", lambda: (heads(N), (table(S, D), table(S, D)))),
    "apply_rotary_timm": ("RotaryPosEmbInterleaved", lambda: (heads(N), table(S, 2 * D))),
    "apply_rot_embed": ("RotaryPosEmbInterleaved", lambda: (heads(N), table(S, 2 * D))),
    "apply_rope_to_both": ("RotaryPosEmb", lambda: (*_qk(), table(S, D), table(S, D))),
    "apply_rotary_without_autocast": ("RotaryPosEmb", lambda: (heads(N), table(S, D // 2))),
    "apply_rope_of_as_many_heads": (
        "RotaryPosEmbInterleaved",
        lambda: (heads(N, False), heads(N, False), units(S, D // 2)),
    ),
    "apply_rotary_in_parts": ("RotaryPosEmb", lambda: (heads(N), table(S, D // 2), table(S, D // 2))),
    "apply_rotary_along": ("RotaryPosEmbInterleaved", lambda: (*_qk(False), 1, table(S, D // 2, 2, 2))),
    "apply_rotary_with_options": ("RotaryPosEmb", lambda: (heads(N), table(S, D), table(S, D))),
    "apply_rope_by_embedding": ("RotaryPosEmb", lambda: (heads(N), _positions(), table(T, D), table(T, D))),
    "apply_rotary_pos_emb_index": (
        "RotaryPosEmb",
        lambda: (*(x.transpose(0, 1) for x in _qk(False)), table(T, 1, D), table(T, 1, D), _positions().T),
    ),
    "apply_rotary_compiled": ("RotaryPosEmb", lambda: (*_qk(), table(S, D), table(S, D))),
    "apply_rotary_splitting": ("RotaryPosEmb", lambda: (*_qk(), table(S, D // 2), table(S, D // 2))),
    "apply_rotary_einsum": ("RotaryPosEmb", lambda: (*_qk(), table(S, D // 2), table(S, D // 2))),
    "apply_rope_by_polar": ("RotaryPosEmbInterleaved", lambda: (heads(N), table(S, D // 2))),
    "apply_rotary_addcmul": ("RotaryPosEmb", lambda: (*_qk(), table(S, D), table(S, D))),
    "rot": ("RotaryPosEmbInterleaved", lambda: (heads(N, False), units(S, D // 2))),
    "apply_rotary_signed": ("RotaryPosEmb", lambda: (heads(N), table(S, D), table(S, D))),
}
LOOKALIKES = [name for name in list(globals()) if name.startswith("apply_") and name not in SERVED]


def _qk(heads_first: bool = True) -> tuple[Tensor, Tensor]:
    return heads(N, heads_first), heads(M, heads_first)


def _positions() -> Tensor:
    return torch.randint(T, (B, S))


def caller(name: str) -> type[nn.Module]:
    """Return a class whose forward calls a function of this file by its name."""
    made = {}
    exec(f"def forward(self, *args, **kwargs):\n    return {name}(*args, **kwargs)", globals(), made)
    return type("Caller", (nn.Module,), {**made, "__module__": __name__})
