"""Norms of Qwen3-8B: ``kernels benchmark ./RMSNorm``.

Each is timed against transformers' own forward, in bfloat16. `kernels` does not wait for an NPU before it stops the
clock, so every workload waits itself.
"""

import torch
from kernels.benchmark import Benchmark
from torch import Tensor

EPS = 1e-6
TOKENS = 4096


class RMSNormBenchmark(Benchmark):
    seed = 0

    def setup_hidden_states(self) -> None:
        self._inputs(1, TOKENS, 4096)

    def benchmark_hidden_states(self) -> None:
        self.out = self._wait(self.kernel.rms_norm(self.x, self.weight, EPS))

    def verify_hidden_states(self) -> Tensor:
        return self._wait(_transformers(self.x, self.weight))

    def setup_query_heads(self) -> None:
        self._inputs(1, TOKENS, 32, 128)

    benchmark_query_heads = benchmark_hidden_states
    verify_query_heads = verify_hidden_states

    def setup_decode(self) -> None:
        self._inputs(32, 1, 4096)

    benchmark_decode = benchmark_hidden_states
    verify_decode = verify_hidden_states

    def setup_training(self) -> None:
        """Forward and backward; what is verified is the gradient of the input."""
        self._inputs(1, TOKENS, 4096)
        self.grad_output = torch.randn_like(self.x)
        self.x.requires_grad_()
        self.weight.requires_grad_()

    def benchmark_training(self) -> None:
        self.out = self._wait(self._gradient(self.kernel.rms_norm(self.x, self.weight, EPS)))

    def verify_training(self) -> Tensor:
        return self._wait(self._gradient(_transformers(self.x, self.weight)))

    def setup_add(self) -> None:
        self._inputs(32, 1, 4096)
        self.residual = torch.randn_like(self.x)

    def benchmark_add(self) -> None:
        self.out = self._wait(self.kernel.add_rms_norm(self.x, self.residual, self.weight, EPS)[0])

    def verify_add(self) -> Tensor:
        return self._wait(_transformers(self.x + self.residual, self.weight))

    def _inputs(self, *shape: int) -> None:
        self.x = torch.randn(shape, dtype=torch.bfloat16, device=self.device)
        # small, so that results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there
        self.weight = 0.1 * torch.rand(shape[-1], dtype=torch.bfloat16, device=self.device)

    def _gradient(self, y: Tensor) -> Tensor:
        gradient, _ = torch.autograd.grad(y, (self.x, self.weight), self.grad_output)
        return gradient

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result


def _transformers(x: Tensor, weight: Tensor) -> Tensor:
    """LlamaRMSNorm.forward of transformers 5.22.2, models/llama/modeling_llama.py."""
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + EPS)
    return weight * hidden_states.to(x.dtype)
