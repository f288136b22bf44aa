"""Attention of Qwen3-8B, Gemma 3 and gpt-oss: ``kernels benchmark ./FlashAttention``.

Each is timed against transformers' eager lines, in bfloat16. `kernels` does not wait for an NPU before it stops the
clock, so every workload waits itself.
"""

import torch
from kernels.benchmark import Benchmark
from torch import Tensor, nn

LENGTH, HEADS, KEY_HEADS, SIZE = 4096, 32, 8, 128
WINDOW = 128
CACHE, ROWS = 4096, 8


class FlashAttentionBenchmark(Benchmark):
    seed = 0

    def setup_causal(self) -> None:
        """Queries, keys and values as projections leave them."""
        self._draw(1, LENGTH, LENGTH)
        self.options = {"causal": True}

    def benchmark_causal(self) -> None:
        self.out = self._wait(self.kernel.flash_attn_func(self.q, self.k, self.v, **self.options))

    def verify_causal(self) -> Tensor:
        return self._wait(_eager(self.q, self.k, self.v, _mask(self.q, self.k)))

    def setup_window(self) -> None:
        self._draw(1, LENGTH, LENGTH)
        self.options = {"causal": True, "window_size": (WINDOW - 1, 0)}

    benchmark_window = benchmark_causal

    def verify_window(self) -> Tensor:
        return self._wait(_eager(self.q, self.k, self.v, _mask(self.q, self.k, WINDOW)))

    def setup_sinks(self) -> None:
        self.setup_causal()
        self.options["s_aux"] = _small((HEADS,), self.device)

    benchmark_sinks = benchmark_causal

    def verify_sinks(self) -> Tensor:
        return self._wait(_eager(self.q, self.k, self.v, _mask(self.q, self.k), self.options["s_aux"]))

    def setup_packed(self) -> None:
        """Four sequences of several lengths in one row."""
        self._draw(1, LENGTH, LENGTH)
        self.ends = [0, LENGTH // 8, LENGTH // 4, LENGTH // 2, LENGTH]

    def benchmark_packed(self) -> None:
        tensors = (tensor.squeeze(0) for tensor in (self.q, self.k, self.v))
        out = self.kernel.flash_attn_varlen_func(*tensors, self.ends, self.ends, causal=True)
        self.out = self._wait(out.unsqueeze(0))

    def verify_packed(self) -> Tensor:
        parts = [[t[:, a:b] for t in (self.q, self.k, self.v)] for a, b in zip(self.ends, self.ends[1:])]
        return self._wait(torch.cat([_eager(q, k, v, _mask(q, k)) for q, k, v in parts], 1))

    def setup_decode(self) -> None:
        """One token of eight sequences over a cache, which lies as [B, N, S, D]."""
        self._draw(ROWS, 1, CACHE)
        self.k, self.v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (self.k, self.v))
        self.options = {"causal": True}

    benchmark_decode = benchmark_causal
    verify_decode = verify_causal

    def setup_training(self) -> None:
        """Forward and backward; what is verified is the gradient of the queries."""
        self.setup_causal()
        self.q.requires_grad_()
        self.grad_output = _small((1, LENGTH, HEADS, SIZE), self.device)

    def benchmark_training(self) -> None:
        y = self.kernel.flash_attn_func(self.q, self.k, self.v, causal=True)
        self.out = self._wait(self._gradient(y))

    def verify_training(self) -> Tensor:
        return self._wait(self._gradient(_eager(self.q, self.k, self.v, _mask(self.q, self.k))))

    def _draw(self, rows: int, queries: int, keys: int) -> None:
        self.q = _small((rows, queries, HEADS, SIZE), self.device)
        self.k, self.v = (_small((rows, keys, KEY_HEADS, SIZE), self.device) for _ in range(2))

    def _gradient(self, y: Tensor) -> Tensor:
        return torch.autograd.grad(y, self.q, self.grad_output)[0]

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result


def _small(shape: tuple[int, ...], device: str) -> Tensor:
    """Results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
    return 2 * torch.rand(shape, dtype=torch.bfloat16, device=device) - 1


def _mask(q: Tensor, k: Tensor, window: int | None = None) -> Tensor:
    """What is added to the scores: the last query stands at the last key."""
    places = torch.arange(k.shape[1], device=q.device)
    distance = places - (torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]).unsqueeze(-1)
    left_out = (distance > 0) | (distance <= -(window or k.shape[1]))
    return torch.zeros_like(left_out, dtype=q.dtype).masked_fill(left_out, torch.finfo(q.dtype).min)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None) -> Tensor:
    """eager_attention_forward of transformers 5.22.2, models/gpt_oss/modeling_gpt_oss.py and models/qwen3."""
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    weights = torch.matmul(query, key.transpose(2, 3)) * SIZE**-0.5 + mask
    if sinks is not None:
        weights = torch.cat([weights, sinks.reshape(1, -1, 1, 1).expand(*weights.shape[:-1], 1)], dim=-1)
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, value).transpose(1, 2).contiguous()
