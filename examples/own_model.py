"""Train a language model of your own code, without transformers: what it computes decides what is swapped."""

from kernels_ext_npu.demo import arguments

arguments.require_npu()

import torch
import torch.nn.functional as F
from torch import nn

import kernels_ext_npu

WORDS, WIDTH, HEADS, LAYERS = 512, 128, 4, 2


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype) * self.gain


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rotate(x, angles):
    """Turn pairs of x ``[B, S, N, D]`` by angles ``[S, D / 2]``."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between, self.feed_forward = Norm(), Norm(), FeedForward()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, angles):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.between(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), Norm()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        size = WIDTH // HEADS
        self.register_buffer("frequencies", 10_000 ** -(torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, words, targets=None):
        angles = torch.arange(words.shape[1], device=words.device)[:, None] * self.frequencies
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = Model().to("npu")
kernels_ext_npu.kernelize(model)
print(kernels_ext_npu.report(model))

words = torch.randint(WORDS, (4, 65)).to("npu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    with torch.autocast("npu", torch.bfloat16):
        loss = model(words[:, :-1], words[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
