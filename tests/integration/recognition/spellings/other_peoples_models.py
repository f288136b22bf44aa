"""Models that are plain modules of torch: a diffusion transformer, a vision tower, and a student's llama."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.recognition.spellings.other_peoples_layer_norms import Float32LayerNorm, GeluByPower, Quick
from tests.integration.recognition.spellings.other_peoples_longer_mlps import Dropping
from tests.integration.recognition.spellings.other_peoples_mlps import MetaMLP, Packed
from tests.integration.recognition.spellings.other_peoples_norms import WIDTH, FluxNorm, MetaNorm

HEADS = 4


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for each in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)


class ModulatedBlock(nn.Module):
    """Shifts and scales norms without weights by what the time gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query_norm, self.key_norm = FluxNorm(), FluxNorm()
        self.mlp = Packed()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(time)).unsqueeze(1).chunk(6, dim=-1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, dim=-1)
        x = x + gate1 * self.proj(attend(self.query_norm(q), self.key_norm(k), v))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), GeluByPower(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([ModulatedBlock() for _ in range(2)])
        self.final = nn.Linear(WIDTH, 48)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x, time = self.patches(image).flatten(2).transpose(1, 2), self.time(time[:, None])
        for block in self.blocks:
            x = block(x, time)
        return self.final(x)


class VisionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = Float32LayerNorm(), Float32LayerNorm()
        self.attn, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), Dropping()
        self.adapter = nn.Sequential(nn.Linear(WIDTH, WIDTH), Quick())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + attend(*self.attn(self.ln_1(x)).chunk(3, dim=-1))
        x = x + self.mlp(self.ln_2(x))
        return x + self.adapter(x)


class VisionTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(VisionBlock(), VisionBlock())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.patches(image).flatten(2).transpose(1, 2)).mean(1)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = MetaNorm(), MetaNorm()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.feed_forward = MetaMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        x = x + self.wo(attend(self.wq(h), self.wk(h), self.wv(h)))
        return x + self.feed_forward(self.ffn_norm(x))


class StudentsLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([LlamaBlock() for _ in range(2)])
        self.norm, self.output = MetaNorm(), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))
