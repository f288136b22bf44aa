"""Head and loss of Qwen3-8B: ``kernels benchmark ./CrossEntropy``.

Each is timed against transformers' lines, in bfloat16. `kernels` does not wait for an NPU before it stops the clock,
so every workload waits itself.
"""

import torch
from kernels.benchmark import Benchmark
from torch import Tensor, nn

TOKENS = 4096
HIDDEN_SIZE, WORDS = 4096, 151936


class CrossEntropyBenchmark(Benchmark):
    seed = 0

    def setup_head(self) -> None:
        """Head and loss, without gradients: the loss of each token."""
        scale = HIDDEN_SIZE**-0.5
        self.hidden = _small((TOKENS, HIDDEN_SIZE), self.device)
        self.weight = _small((WORDS, HIDDEN_SIZE), self.device) * scale
        self.labels = torch.randint(WORDS, (TOKENS,), device=self.device)

    def benchmark_head(self) -> None:
        self.out = self._wait(self._rows())

    def verify_head(self) -> Tensor:
        return self._wait(_transformers(self.hidden @ self.weight.t(), self.labels))

    def setup_training(self) -> None:
        """Forward and backward; what is verified is the gradient of the hidden states."""
        self.setup_head()
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    def benchmark_training(self) -> None:
        self.out = self._wait(self._gradient(self._rows()))

    def verify_training(self) -> Tensor:
        return self._wait(self._gradient(_transformers(self.hidden @ self.weight.t(), self.labels)))

    def setup_logits(self) -> None:
        """The loss of logits that are there; what is verified is their gradient."""
        self.setup_head()
        self.logits = (self.hidden @ self.weight.t()).requires_grad_()

    def benchmark_logits(self) -> None:
        rows = self.kernel.cross_entropy(self.logits, self.labels, reduction="none")
        self.out = self._wait(torch.autograd.grad(rows.sum(), self.logits)[0])

    def verify_logits(self) -> Tensor:
        rows = _transformers(self.logits, self.labels)
        return self._wait(torch.autograd.grad(rows.sum(), self.logits)[0])

    def _rows(self) -> Tensor:
        return self.kernel.linear_cross_entropy(self.hidden, self.weight, self.labels, reduction="none")

    def _gradient(self, rows: Tensor) -> Tensor:
        return torch.autograd.grad(rows.sum(), (self.hidden, self.weight))[0]

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result


def _small(shape: tuple[int, ...], device: str) -> Tensor:
    """Results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
    return 2 * torch.rand(shape, dtype=torch.bfloat16, device=device) - 1


def _transformers(logits: Tensor, labels: Tensor) -> Tensor:
    """ForCausalLMLoss of transformers 5.22.2, loss/loss_utils.py, token by token."""
    return nn.functional.cross_entropy(logits.float(), labels, reduction="none")
