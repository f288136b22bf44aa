"""Projections of Qwen3-8B's attention with adapters, in training: ``kernels benchmark ./Linear``.

They are timed against peft's lines, in bfloat16. `kernels` does not wait for an NPU before it stops the clock, so the
workload waits itself.
"""

import torch
from kernels.benchmark import Benchmark
from torch import Tensor
from torch.nn import functional as F

PROJECTED_ROWS, INPUTS = 4096, 4096
SIZES = (4096, 1024, 1024)
RANK = 16


class LinearBenchmark(Benchmark):
    seed = 0

    def setup_adapters(self) -> None:
        """Queries, keys and values, forward and backward; what is verified is the gradient of the hidden states."""
        self.x = _drawn((PROJECTED_ROWS, INPUTS), 1, self.device).requires_grad_()
        self.weights = [_drawn((size, INPUTS), INPUTS, self.device) for size in SIZES]
        self.a = [_drawn((RANK, INPUTS), INPUTS, self.device).requires_grad_() for _ in SIZES]
        self.b = [_drawn((size, RANK), RANK, self.device).requires_grad_() for size in SIZES]

    def benchmark_adapters(self) -> None:
        adapters = [self.kernel.Adapter(a, b, 2.0) for a, b in zip(self.a, self.b)]
        outputs = self.kernel.lora_linears(self.x, [(w, None, each) for w, each in zip(self.weights, adapters)])
        self.out = self._gradient(outputs, [*self.a, *self.b])

    def verify_adapters(self) -> Tensor:
        """Linear.forward of peft 0.21.2, tuners/lora/layer.py."""
        layers = zip(self.weights, self.a, self.b)
        outputs = [F.linear(self.x, w) + F.linear(F.linear(self.x, a), b) * 2.0 for w, a, b in layers]
        return self._gradient(outputs, [*self.a, *self.b])

    def _gradient(self, outputs: list[Tensor] | tuple[Tensor, ...], parameters: list[Tensor]) -> Tensor:
        for tensor in (self.x, *parameters):
            tensor.grad = None
        torch.autograd.backward(outputs, [torch.full_like(y, 2.0**-6) for y in outputs])
        torch.accelerator.synchronize()
        return self.x.grad


def _drawn(shape: tuple[int, ...], size: int, device: str) -> Tensor:
    """Results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device) * size**-0.5
