"""Activations of CLIP's largest vision tower and of GPT-2: ``kernels benchmark ./Activation``.

Each is timed against transformers' own forward, in bfloat16. `kernels` does not wait for an NPU before it stops the
clock, so every workload waits itself.
"""

import math

import torch
from kernels.benchmark import Benchmark
from torch import Tensor


class ActivationBenchmark(Benchmark):
    seed = 0

    def setup_quick_gelu(self) -> None:
        self.x = _small((1, 577, 4096), self.device)

    def benchmark_quick_gelu(self) -> None:
        self.out = self._wait(self.kernel.quick_gelu(self.x))

    def verify_quick_gelu(self) -> Tensor:
        return self._wait(_quick_gelu(self.x))

    def setup_gelu_tanh(self) -> None:
        self.x = _small((1, 1024, 6400), self.device)

    def benchmark_gelu_tanh(self) -> None:
        self.out = self._wait(self.kernel.gelu_tanh(self.x))

    def verify_gelu_tanh(self) -> Tensor:
        return self._wait(_gelu_new(self.x))

    def setup_training(self) -> None:
        """Forward and backward of quick_gelu; what is verified is the gradient."""
        self.setup_quick_gelu()
        self.x.requires_grad_()
        self.grad_output = _small(tuple(self.x.shape), self.device)

    def benchmark_training(self) -> None:
        self.out = self._wait(self._gradient(self.kernel.quick_gelu(self.x)))

    def verify_training(self) -> Tensor:
        return self._wait(self._gradient(_quick_gelu(self.x)))

    def _gradient(self, y: Tensor) -> Tensor:
        return torch.autograd.grad(y, self.x, self.grad_output)[0]

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result


def _small(shape: tuple[int, ...], device: str) -> Tensor:
    """Results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
    return 2 * torch.rand(shape, dtype=torch.bfloat16, device=device) - 1


def _quick_gelu(x: Tensor) -> Tensor:
    """QuickGELUActivation.forward of transformers 5.22.2, activations.py."""
    return x * torch.sigmoid(1.702 * x)


def _gelu_new(x: Tensor) -> Tensor:
    """NewGELUActivation.forward of transformers 5.22.2, activations.py."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
