"""The linear layers of Qwen3-Next, Kimi Linear and Mamba: ``kernels benchmark ./LinearAttention``.

Each is timed against transformers' own function, in bfloat16. `kernels` does not wait for an NPU before it stops the
clock, so every workload waits itself.
"""

import torch
from kernels.benchmark import Benchmark
from torch import Tensor

PREFILL, MIXER_HEADS, MIXER_SIZE, MIXED, DECODED, SCANNED = 4096, 32, 128, 8192, 8, 5120


class LinearAttentionBenchmark(Benchmark):
    seed = 0

    def setup_delta_rule(self) -> None:
        """The mixer of Qwen3-Next, prefill."""
        self._draw(1, PREFILL)
        self.function = self.kernel.chunk_gated_delta_rule

    def benchmark_delta_rule(self) -> None:
        self.out = self._wait(self.function(*self.tensors, use_qk_l2norm_in_kernel=True)[0])

    def verify_delta_rule(self) -> Tensor:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        return self._wait(torch_chunk_gated_delta_rule(*self.tensors, use_qk_l2norm_in_kernel=True)[0])

    def setup_kda(self) -> None:
        """The mixer of Kimi Linear, prefill."""
        self._draw(1, PREFILL, by_channel=True)
        self.function = self.kernel.chunk_kda

    benchmark_kda = benchmark_delta_rule

    def verify_kda(self) -> Tensor:
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        return self._wait(chunk_kimi_delta_attention(*self.tensors, use_qk_l2norm_in_kernel=True)[0])

    def setup_decode(self) -> None:
        """One token of eight sequences."""
        self._draw(DECODED, 1)
        self.state = 0.1 * torch.randn(DECODED, MIXER_HEADS, MIXER_SIZE, MIXER_SIZE, device=self.device)

    def benchmark_decode(self) -> None:
        self.out = self._wait(self.kernel.fused_recurrent_gated_delta_rule(*self.tensors, **self._options())[0])

    def verify_decode(self) -> Tensor:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

        return self._wait(torch_recurrent_gated_delta_rule(*self.tensors, **self._options())[0])

    def setup_training(self) -> None:
        """Forward and backward; what is verified is the gradient of the values."""
        self.setup_delta_rule()
        self.tensors[2].requires_grad_()
        self.grad_output = 0.1 * torch.rand_like(self.tensors[2])

    def benchmark_training(self) -> None:
        self.out = self._gradient(self.function(*self.tensors, use_qk_l2norm_in_kernel=True)[0])

    def verify_training(self) -> Tensor:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        return self._gradient(torch_chunk_gated_delta_rule(*self.tensors, use_qk_l2norm_in_kernel=True)[0])

    def setup_convolution(self) -> None:
        """As projections leave the tokens."""
        self.x = 0.5 * torch.randn(1, PREFILL, MIXED, dtype=torch.bfloat16, device=self.device).transpose(1, 2)
        self.weight = 0.5 * torch.randn(MIXED, 4, dtype=torch.bfloat16, device=self.device)

    def benchmark_convolution(self) -> None:
        self.out = self._wait(self.kernel.causal_conv1d_fn(self.x, self.weight, activation="silu"))

    def verify_convolution(self) -> Tensor:
        from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

        return self._wait(causal_conv1d_fn(self.x, self.weight, activation="silu"))

    def setup_scan(self) -> None:
        """The scan of Mamba-2.8B, prefill."""
        u, delta, z = (self._channels_first(SCANNED) for _ in range(3))
        self.tensors = [u, delta, -torch.rand(SCANNED, 16, device=self.device)]
        self.tensors += [self._channels_first(16), self._channels_first(16)]
        self.others = {"z": z, "D": torch.rand(SCANNED, device=self.device), "delta_softplus": True}

    def benchmark_scan(self) -> None:
        self.out = self._wait(self.kernel.selective_scan_fn(*self.tensors, **self.others))

    def verify_scan(self) -> Tensor:
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan

        return self._wait(mamba_selective_scan(*self.tensors, **self.others).to(self.out.dtype))

    def _channels_first(self, channels: int) -> Tensor:
        """As projections leave the tokens; small, so that results stay below one."""
        return 0.2 * torch.randn(1, PREFILL, channels, dtype=torch.bfloat16, device=self.device).transpose(1, 2)

    def _draw(self, rows: int, length: int, by_channel: bool = False) -> None:
        """Results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
        shape = rows, length, MIXER_HEADS
        q, k, v = (torch.randn(*shape, MIXER_SIZE, dtype=torch.bfloat16, device=self.device) for _ in range(3))
        g = -torch.rand(*shape, *[MIXER_SIZE] * by_channel, device=self.device)
        self.tensors = [q, k, v, g, torch.rand(shape, dtype=torch.bfloat16, device=self.device)]

    def _options(self) -> dict[str, object]:
        return {"initial_state": self.state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def _gradient(self, y: Tensor) -> Tensor:
        return self._wait(torch.autograd.grad(y, self.tensors[2], self.grad_output)[0])

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result
