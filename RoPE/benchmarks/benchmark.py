"""Rotary embedding of Qwen3-8B and others: ``kernels benchmark ./RoPE``.

Each is timed against transformers' own function, in bfloat16. `kernels` does not wait for an NPU before it stops the
clock, so every workload waits itself.
"""

import torch
from kernels.benchmark import Benchmark
from torch import Tensor

TOKENS = 4096


class RoPEBenchmark(Benchmark):
    seed = 0

    def setup_prefill(self) -> None:
        self._inputs(1, TOKENS)

    def benchmark_prefill(self) -> None:
        self.out = self._wait(self.kernel.apply_rotary_pos_emb(self.q, self.k, self.cos, self.sin)[0])

    def verify_prefill(self) -> Tensor:
        return self._wait(_transformers(self.q, self.k, self.cos, self.sin)[0])

    def setup_decode(self) -> None:
        self._inputs(32, 1)

    benchmark_decode = benchmark_prefill
    verify_decode = verify_prefill

    def setup_training(self) -> None:
        """Forward and backward; what is verified is the gradient of q."""
        self._inputs(1, TOKENS)
        self.grad_output = _small(self.q.shape, self.device)
        self.q.requires_grad_()

    def benchmark_training(self) -> None:
        rotated = self.kernel.apply_rotary_pos_emb(self.q, self.k, self.cos, self.sin)[0]
        self.out = self._wait(torch.autograd.grad(rotated, self.q, self.grad_output)[0])

    def verify_training(self) -> Tensor:
        rotated = _transformers(self.q, self.k, self.cos, self.sin)[0]
        return self._wait(torch.autograd.grad(rotated, self.q, self.grad_output)[0])

    def setup_vision(self) -> None:
        """The vision tower of Qwen2.5-VL: [S, N, D], computed in float32."""
        self.q = _small((TOKENS, 16, 80), self.device)
        self.cos, self.sin = (t.unsqueeze(1) for t in _tables(TOKENS, 80, self.device))

    def benchmark_vision(self) -> None:
        self.out = self._wait(self.kernel.rotary_mul(self.q, self.cos, self.sin))

    def verify_vision(self) -> Tensor:
        q, cos, sin = self.q.float(), self.cos.float(), self.sin.float()
        return self._wait((q * cos + _rotate_half(q) * sin).to(self.q.dtype))

    def _inputs(self, batch: int, positions: int) -> None:
        self.q = _small((batch, positions, 32, 128), self.device).transpose(1, 2)
        self.k = _small((batch, positions, 8, 128), self.device).transpose(1, 2)
        self.cos, self.sin = (t.expand(batch, -1, -1).contiguous() for t in _tables(positions, 128, self.device))

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result


def _small(shape: tuple[int, ...], device: str) -> Tensor:
    """Below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
    return torch.rand(shape, dtype=torch.bfloat16, device=device) - 0.5


def _tables(positions: int, head_size: int, device: str) -> tuple[Tensor, Tensor]:
    frequencies = 1e6 ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    angles = (torch.arange(positions, device=device)[:, None] * frequencies).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _transformers(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb of transformers 5.22.2, models/qwen3/modeling_qwen3.py."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin
