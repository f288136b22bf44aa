"""Modules that only look like one that rotates."""

import torch
from torch import nn

from tests.integration.recognition.spellings.other_peoples_rotating_modules import (
    FourDimensions,
    QueriesAndKeys,
    angles,
    frequencies,
    rotate_half,
)


class RopeXPos(QueriesAndKeys):
    def forward(self, q, k):
        scale = 1.01 ** torch.arange(q.shape[-2], device=q.device)[:, None]
        q, k = super().forward(q, k)
        return q * scale, k / scale


class RopeInTraining(FourDimensions):
    def forward(self, x):
        return super().forward(x) if self.training else x


class RopeAdding(FourDimensions):
    def forward(self, x):
        return super().forward(x) + self.sin_cached[:, :, : x.shape[2]]


class RopeTable(FourDimensions):
    def forward(self, x):
        return x + self.sin_cached[:, :, : x.shape[2]]


class RopeDropping(FourDimensions):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class RopeWriting(FourDimensions):
    def forward(self, x):
        return x.copy_(super().forward(x))


class RopeDrawing(FourDimensions):
    def forward(self, x):
        return super().forward(x) * torch.rand(1, device=x.device)


class RopeLearned(nn.Module):
    def __init__(self):
        super().__init__()
        self.angles = nn.Parameter(angles().repeat(1, 2))

    def forward(self, x):
        turns = self.angles[: x.shape[-2]]
        return x * turns.cos() + rotate_half(x) * turns.sin()


class RopeCounting(FourDimensions):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class RopeCaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", frequencies())
        self._seq_len_cached = self._cos_cached = self._sin_cached = None

    def _update(self, x):
        if x.shape[-2] != self._seq_len_cached:
            self._seq_len_cached = x.shape[-2]
            turns = torch.outer(torch.arange(x.shape[-2], device=x.device).type_as(self.inv_freq), self.inv_freq)
            emb = torch.cat((turns, turns), dim=-1)
            self._cos_cached, self._sin_cached = emb.cos()[None, None], emb.sin()[None, None]

    def forward(self, q, k):
        self._update(k)
        cos, sin = self._cos_cached, self._sin_cached
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class RopeOnTheHost(FourDimensions):
    def forward(self, x):
        return super().forward(x) if self.cos_cached.sum().item() < 1e9 else x


class RopeClamped(FourDimensions):
    def forward(self, x):
        return super().forward(x).clamp(-1e3, 1e3)


class RopeNormed(FourDimensions):
    def forward(self, x):
        return super().forward(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class RopeOfQueries(QueriesAndKeys):
    def forward(self, q, k):
        return super().forward(q, k)[0], k


class RopeMirrored(FourDimensions):
    def turned(self, x):
        return x.flip(-1)


class RopeDetached(FourDimensions):
    def turned(self, x):
        return super().turned(x).detach()


class RopeWithoutGradient(FourDimensions):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class RopeByHeads(FourDimensions):
    def forward(self, x):
        return super().forward(x) if x.shape[1] > 5 else x


class RopeForFewSequences(FourDimensions):
    def forward(self, x):
        return super().forward(x) if len(x) < 100 else x


class RopeOfHeads(FourDimensions):
    def forward(self, x):
        return super().forward(x) * (1 + torch.arange(x.shape[1], device=x.device)[:, None, None])


class RopeThatCounts(FourDimensions):
    def __init__(self):
        super().__init__()
        self.calls = {"of all": 0}

    def forward(self, x):
        self.calls["of all"] += 1
        return super().forward(x)


class RopeByAnOption(FourDimensions):
    def forward(self, x, **options):
        return super().forward(x) * options.get("scale", 1)


FACTORS = [1.0]


class RopeByAGlobal(FourDimensions):
    def louder(self, x):
        return FACTORS[0] * x

    def forward(self, x):
        return self.louder(super().forward(x))


class RopeWritingItsTable(FourDimensions):
    def forward(self, x):
        self.cos_cached.mul_(1.0)
        return super().forward(x)


LOOKALIKES = [value for name, value in list(globals().items()) if name.startswith("Rope")]
