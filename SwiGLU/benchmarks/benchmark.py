"""Gated linear units of Qwen3-8B and others: ``kernels benchmark ./SwiGLU``.

Each is timed against transformers' own lines, in bfloat16. `kernels` does not wait for an NPU before it stops the
clock, so every workload waits itself.
"""

import torch
from kernels.benchmark import Benchmark
from torch import Tensor
from torch.nn import functional as F

INTERMEDIATE_SIZE = 12288
TOKENS = 4096
ALPHA = 1.702
LIMIT = 0.5  # gpt-oss has 7, which no value here would reach


class SwiGLUBenchmark(Benchmark):
    seed = 0

    def setup_joined(self) -> None:
        """Gate and up as one product gives them."""
        self.gate_up = _small((1, TOKENS, 2 * INTERMEDIATE_SIZE), self.device)

    def benchmark_joined(self) -> None:
        self.out = self._wait(self.kernel.swiglu(self.gate_up))

    def verify_joined(self) -> Tensor:
        return self._wait(_swiglu(*self.gate_up.chunk(2, -1)))

    def setup_two_tensors(self) -> None:
        self.gate, self.up = (_small((1, TOKENS, INTERMEDIATE_SIZE), self.device) for _ in range(2))

    def benchmark_two_tensors(self) -> None:
        self.out = self._wait(self.kernel.swiglu(self.gate, self.up))

    def verify_two_tensors(self) -> Tensor:
        return self._wait(_swiglu(self.gate, self.up))

    setup_geglu = setup_joined

    def benchmark_geglu(self) -> None:
        self.out = self._wait(self.kernel.geglu(self.gate_up))

    def verify_geglu(self) -> Tensor:
        return self._wait(_geglu(*self.gate_up.chunk(2, -1)))

    setup_clipped = setup_joined

    def benchmark_clipped(self) -> None:
        self.out = self._wait(self.kernel.clipped_swiglu(self.gate_up, ALPHA, LIMIT))

    def verify_clipped(self) -> Tensor:
        return self._wait(_clipped_swiglu(self.gate_up))

    def setup_decode(self) -> None:
        self.gate_up = _small((32, 1, 2 * INTERMEDIATE_SIZE), self.device)

    benchmark_decode = benchmark_joined
    verify_decode = verify_joined

    def setup_training(self) -> None:
        """Forward and backward; what is verified is the gradient of gate and up."""
        self.setup_joined()
        self.gate_up.requires_grad_()
        self.grad_output = _small((1, TOKENS, INTERMEDIATE_SIZE), self.device)

    def benchmark_training(self) -> None:
        self.out = self._wait(self._gradient(self.kernel.swiglu(self.gate_up)))

    def verify_training(self) -> Tensor:
        return self._wait(self._gradient(_swiglu(*self.gate_up.chunk(2, -1))))

    def _gradient(self, y: Tensor) -> Tensor:
        return torch.autograd.grad(y, self.gate_up, self.grad_output)[0]

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result


def _small(shape: tuple[int, ...], device: str) -> Tensor:
    """Results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
    return 2 * torch.rand(shape, dtype=torch.bfloat16, device=device) - 1


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Qwen3MLP.forward of transformers 5.22.2, models/qwen3/modeling_qwen3.py, between its projections."""
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    """GemmaMLP.forward of transformers 5.22.2, models/gemma/modeling_gemma.py, between its projections."""
    return F.gelu(gate, approximate="tanh") * up


def _clipped_swiglu(gate_up: Tensor) -> Tensor:
    """GptOssExperts._apply_gate of transformers 5.22.2, models/gpt_oss/modeling_gpt_oss.py."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=LIMIT)
    up = up.clamp(min=-LIMIT, max=LIMIT)
    glu = gate * torch.sigmoid(gate * ALPHA)
    return (up + 1) * glu
