"""Modules that rotate, as other people spell them."""

import torch
from torch import Tensor, nn

B, N, M, S, D, LONGEST = 2, 8, 4, 6, 64, 40


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def frequencies(dim: int = D) -> Tensor:
    return 1.0 / 10_000 ** (torch.arange(0, dim, 2).float() / dim)


def angles(dim: int = D) -> Tensor:
    return torch.outer(torch.arange(LONGEST).float(), frequencies(dim))


class CachedPairs(nn.Module):
    """Keeps cos and sin of neighbours side by side, and takes positions by name alone."""

    def __init__(self, dim=D, base=10_000):
        super().__init__()
        self.dim, self.base, self.max_seq_len = dim, base, LONGEST
        self.rope_init()

    def rope_init(self):
        self.register_buffer("theta", self.base ** -(torch.arange(0, self.dim, 2).float() / self.dim), persistent=False)
        turns = torch.einsum("s,h->sh", torch.arange(self.max_seq_len).float(), self.theta)
        self.register_buffer("cache", torch.stack([turns.cos(), turns.sin()], dim=-1), persistent=False)

    def forward(self, x, *, input_pos=None):
        cache = self.cache[: x.size(1)] if input_pos is None else self.cache[input_pos]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        real = pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1]
        imaginary = pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1]
        return torch.stack([real, imaginary], -1).flatten(3).type_as(x)


class ScaledPairs(CachedPairs):
    """Has to be built before it is called."""

    def __init__(self):
        self.is_built = False
        super().__init__()

    def rope_init(self):
        super().rope_init()
        self.theta = torch.where(self.theta < 0.01, self.theta / 8, self.theta)
        self.is_built = True

    def forward(self, x, *, input_pos=None):
        if not self.is_built:
            raise RuntimeError("call rope_init() first")
        return super().forward(x, input_pos=input_pos)


class OneTable(nn.Module):
    """Has cos beside sin in one table, and positions or none."""

    def __init__(self):
        super().__init__()
        both = angles().repeat(1, 2)
        self.register_buffer("cache", torch.cat([both.cos(), both.sin()], -1), persistent=False)

    def forward(self, x, input_pos=None):
        seq_len, head_dim = x.size(1), x.size(-1)
        table = self.cache[:seq_len] if input_pos is None else self.cache[input_pos]
        table = table.view(-1, seq_len, 1, head_dim * 2)
        x1, x2 = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        turned = torch.cat((-x2, x1), dim=-1)
        return ((x * table[..., :head_dim]) + (turned * table[..., head_dim:])).type_as(x)


class QueriesAndKeys(nn.Module):
    """Rotates both, by tables that are part of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.cat([angles(), angles()], -1).cos())
        self.register_buffer("sin", torch.cat([angles(), angles()], -1).sin())

    def forward(self, q, k):
        cos, sin = self.cos[: q.shape[-2]], self.sin[: q.shape[-2]]
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class FourDimensions(nn.Module):
    """Has tables of four dimensions, and a method that turns."""

    def __init__(self):
        super().__init__()
        emb = torch.cat([angles(), angles()], -1)
        self.register_buffer("cos_cached", emb.cos()[None, None], persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, None], persistent=False)

    def turned(self, x):
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], dim=-1)

    def forward(self, x):
        length = x.shape[2]
        cos, sin = self.cos_cached[:, :, :length].to(x.dtype), self.sin_cached[:, :, :length].to(x.dtype)
        return x * cos + self.turned(x) * sin


class OwnHelper(FourDimensions):
    """Calls a function in a method alone."""

    def turned(self, x):
        return rotate_half(x)


class ComplexTable(nn.Module):
    """Multiplies with complex numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles()), angles()), persistent=False)

    def forward(self, xq, xk):
        units = self.freqs_cis[: xq.shape[1]][None, :, None]
        q, k = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (xq, xk))
        q, k = (torch.view_as_real(each * units).flatten(3) for each in (q, k))
        return q.type_as(xq), k.type_as(xk)


class FromAPosition(nn.Module):
    """Takes the number of the first position."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", angles().cos(), persistent=False)
        self.register_buffer("sin", angles().sin(), persistent=False)

    def forward(self, x, start_pos=0):
        end = start_pos + x.shape[1]
        cos, sin, even, odd = *(t[start_pos:end, None] for t in (self.cos, self.sin)), x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class ByPositions(nn.Module):
    """Is always given positions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.stack([angles().cos(), angles().sin()]), persistent=False)

    def forward(self, x, positions):
        cos, sin = (torch.cat([each, each], -1) for each in self.table[:, positions].unsqueeze(2))
        return x * cos + rotate_half(x) * sin


class FrequenciesAlone(nn.Module):
    """Computes the angles in each call, in float32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, q, k):
        t = torch.arange(q.shape[2], device=q.device, dtype=torch.float32)
        emb = torch.outer(t, self.inv_freq.float()).repeat(1, 2)
        cos, sin = emb.cos().to(q.dtype), emb.sin().to(q.dtype)
        return [q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin]


class PartOfAHead(nn.Module):
    """Rotates the first half of a head."""

    def __init__(self):
        super().__init__()
        self.rotary_dim = D // 2
        self.register_buffer("cos", angles(D // 2).cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles(D // 2).sin().repeat(1, 2), persistent=False)

    def forward(self, x):
        rotated, passed = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([rotated * cos + rotate_half(rotated) * sin, passed], dim=-1)


class NumbersAlone(nn.Module):
    """Holds no tensor at all."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.theta = D, 10_000.0

    def forward(self, x):
        exponents = torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        turns = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.theta**-exponents
        cos, sin = turns.cos()[None, :, None], turns.sin()[None, :, None]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class NumbersAndAHelper(NumbersAlone):
    """Leaves a part to a function of its file."""

    def forward(self, x):
        exponents = torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        turns = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.theta**-exponents
        emb = torch.cat((turns, turns), -1)[None, :, None]
        return (x.float() * emb.cos() + rotate_half(x.float()) * emb.sin()).to(x.dtype)


class NoBuffers(nn.Module):
    """Holds tensors that torch does not know of, which stay on the CPU."""

    def __init__(self):
        super().__init__()
        self.cos, self.sin = angles().cos(), angles().sin()

    def forward(self, x):
        cos, sin = (each[: x.shape[-2]].to(x).repeat_interleave(2, -1) for each in (self.cos, self.sin))
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin


class PositionsFirst(nn.Module):
    """Takes positions in front of sequences, and turns the other way round."""

    def __init__(self):
        super().__init__()
        self.register_buffer("phase", angles()[:, None, None], persistent=False)

    def forward(self, x):
        phase, (a, b) = self.phase[: x.shape[0]], x.tensor_split(2, -1)
        return torch.cat((a * phase.cos() + b * phase.sin(), b * phase.cos() - a * phase.sin()), -1)


class OneHead(nn.Module):
    """Takes heads one by one, and pairs halves of what it gives with neighbours of what it gets."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", angles().cos(), persistent=False)
        self.register_buffer("sin", angles().sin(), persistent=False)

    def forward(self, x):
        cos, sin, even, odd = self.cos[: x.shape[1]], self.sin[: x.shape[1]], x[..., ::2], x[..., 1::2]
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


class Louder(nn.Module):
    """Scales what it rotates, as yarn does."""

    def __init__(self):
        super().__init__()
        self.mscale = 1.2
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x):
        turns = torch.arange(x.shape[-2], device=x.device)[:, None] * self.inv_freq
        emb = turns.repeat(1, 2)
        return x * (self.mscale * emb.cos()) + rotate_half(x) * (self.mscale * emb.sin())


class OfAPicture(nn.Module):
    """Has as many rows as a picture has patches, and takes all of them, as vision towers do."""

    def __init__(self):
        super().__init__()
        sides = torch.outer(torch.arange(2 * S // 4).float(), frequencies(D // 2)).repeat_interleave(2, -1)
        high, wide = sides[:, None].expand(-1, 2, -1), sides[None, :2].expand(len(sides), -1, -1)
        turns = torch.cat((high, wide), -1).flatten(0, 1)
        self.register_buffer("freqs_cos", turns.cos())
        self.register_buffer("freqs_sin", turns.sin())

    def forward(self, t):
        first, second = t.unflatten(-1, (-1, 2)).unbind(-1)
        return t * self.freqs_cos + torch.stack((-second, first), -1).flatten(-2) * self.freqs_sin


class OfATile(nn.Module):
    """Has cos and sin of all patches of a tile in one, and is given options that it does not read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("theta", frequencies(), persistent=False)
        turns = torch.outer(torch.arange(S).float(), self.theta)
        self.register_buffer("cache", torch.stack([turns.cos(), turns.sin()], dim=-1), persistent=False)

    def forward(self, x, **kwargs):
        batch, _, count, width = x.shape
        pairs = x.float().reshape(batch, -1, S, count, width // 2, 2)
        cos, sin = self.cache.view(1, 1, S, 1, -1, 2).unbind(-1)
        first, second = pairs[..., 0], pairs[..., 1]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.reshape(batch, -1, count, width).type_as(x)


class Dynamic(nn.Module):
    """Has other frequencies beyond a length."""

    def __init__(self):
        super().__init__()
        self.max_len = 20
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x):
        length, inv_freq = x.shape[-2], self.inv_freq
        if length > self.max_len:
            inv_freq = inv_freq * (self.max_len / length)
        turns = torch.arange(length, device=x.device)[:, None] * inv_freq
        emb = torch.cat((turns, turns), dim=-1)
        return x * emb.cos() + rotate_half(x) * emb.sin()


def heads(first: bool = True, count: int = N) -> Tensor:
    x = torch.randn(B, count, S, D)
    return x if first else x.transpose(1, 2).contiguous()


def _positions() -> Tensor:
    return torch.randint(LONGEST, (B, S))


# class -> the layer, and what makes arguments
SERVED = {
    CachedPairs: ("RotaryPosEmbInterleaved", lambda: (heads(False),)),
    ScaledPairs: ("RotaryPosEmbInterleaved", lambda: (heads(False),)),
    OneTable: ("RotaryPosEmb", lambda: (heads(False), _positions())),
    QueriesAndKeys: ("RotaryPosEmb", lambda: (heads(), heads(count=M))),
    FourDimensions: ("RotaryPosEmb", lambda: (heads(),)),
    OwnHelper: ("RotaryPosEmb", lambda: (heads(),)),
    ComplexTable: ("RotaryPosEmbInterleaved", lambda: (heads(False), heads(False, M))),
    FromAPosition: ("RotaryPosEmbInterleaved", lambda: (heads(False), 3)),
    ByPositions: ("RotaryPosEmb", lambda: (heads(), _positions())),
    FrequenciesAlone: ("RotaryPosEmb", lambda: (heads(), heads(count=M))),
    PartOfAHead: ("RotaryPosEmb", lambda: (heads(),)),
    NumbersAlone: ("RotaryPosEmb", lambda: (heads(False),)),
    NumbersAndAHelper: ("RotaryPosEmb", lambda: (heads(False),)),
    NoBuffers: ("RotaryPosEmbInterleaved", lambda: (heads(),)),
    PositionsFirst: ("RotaryPosEmb", lambda: (heads().permute(2, 0, 1, 3).contiguous(),)),
    OneHead: ("RotaryPosEmbDeinterleaved", lambda: (heads()[:, 0],)),
    OfATile: ("RotaryPosEmbInterleaved", lambda: (heads(False),)),
    OfAPicture: ("RotaryPosEmbInterleaved", lambda: (heads(),)),
    Louder: ("RotaryPosEmb", lambda: (heads(),)),
    Dynamic: ("RotaryPosEmb", lambda: (heads(),)),
}
