"""Experts of Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3: ``kernels benchmark ./FusedMoE``.

Each is timed against what transformers' grouped_mm computes, in bfloat16. `kernels` does not wait for an NPU before it
stops the clock, so every workload waits itself.
"""

from typing import NamedTuple

import torch
from kernels.benchmark import Benchmark
from torch import Tensor
from torch.nn import functional as F


class Sizes(NamedTuple):
    experts: int
    hidden: int
    intermediate: int
    choices: int


QWEN3 = Sizes(experts=128, hidden=2048, intermediate=768, choices=8)
GPT_OSS = Sizes(experts=32, hidden=2880, intermediate=2880, choices=4)
DEEPSEEK = Sizes(experts=256, hidden=7168, intermediate=2048, choices=8)
RANKS = 16  # that share the experts of DeepSeek-V3
TOKENS = 4096
ALPHA = 1.702
LIMIT = 0.5  # gpt-oss has 7, which no value here would reach


class FusedMoEBenchmark(Benchmark):
    seed = 0

    def setup_prefill(self) -> None:
        self._inputs(QWEN3, TOKENS)

    def benchmark_prefill(self) -> None:
        self.out = self._wait(self.kernel.fused_experts(*self.routed, self.gate_up_proj, self.down_proj))

    def verify_prefill(self) -> Tensor:
        return self._wait(_grouped_mm_experts(*self.routed, self.gate_up_proj.mT, self.down_proj.mT))

    def setup_decode(self) -> None:
        self._inputs(QWEN3, 32)

    benchmark_decode = benchmark_prefill
    verify_decode = verify_prefill

    def setup_training(self) -> None:
        """Forward and backward; what is verified is the gradient of the first weight."""
        self._inputs(QWEN3, TOKENS)
        self.grad_output = _small(self.routed[0].shape, self.device) / 4
        hidden_states, _, top_k_weights = self.routed
        self.leaves = [self.gate_up_proj, self.down_proj, hidden_states, top_k_weights]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def benchmark_training(self) -> None:
        y = self.kernel.fused_experts(*self.routed, self.gate_up_proj, self.down_proj)
        self.out = self._wait(torch.autograd.grad(y, self.leaves, self.grad_output)[0])

    def verify_training(self) -> Tensor:
        y = _grouped_mm_experts(*self.routed, self.gate_up_proj.mT, self.down_proj.mT)
        return self._wait(torch.autograd.grad(y, self.leaves, self.grad_output)[0])

    def setup_clipped(self) -> None:
        """gpt-oss: weights the other way around, biases, and a gate whose values alternate with up's."""
        self._inputs(GPT_OSS, TOKENS)
        experts, hidden, intermediate, _ = GPT_OSS
        self.parameters = [
            self.gate_up_proj.mT.contiguous(),
            self.down_proj.mT.contiguous(),
            *(_small((experts, size), self.device) / 4 for size in (2 * intermediate, hidden)),
        ]
        self.gate = self.kernel.Gate(ALPHA, LIMIT, offset=1.0, interleaved=True)

    def benchmark_clipped(self) -> None:
        y = self.kernel.fused_experts(*self.routed, *self.parameters, activation=self.gate, is_transposed=True)
        self.out = self._wait(y)

    def verify_clipped(self) -> Tensor:
        return self._wait(_grouped_mm_experts(*self.routed, *self.parameters))

    def setup_expert_parallel(self) -> None:
        """One rank of several: ids of experts that live elsewhere are the number of those that live here."""
        local = DEEPSEEK._replace(experts=DEEPSEEK.experts // RANKS)
        self._inputs(local, TOKENS, DEEPSEEK.experts)
        hidden_states, top_k_index, top_k_weights = self.routed
        elsewhere = top_k_index >= local.experts
        self.routed = hidden_states, top_k_index.clamp(max=local.experts), top_k_weights.masked_fill(elsewhere, 0)

    def benchmark_expert_parallel(self) -> None:
        y = self.kernel.fused_experts(*self.routed, self.gate_up_proj, self.down_proj, is_expert_parallel=True)
        self.out = self._wait(y)

    verify_expert_parallel = verify_prefill

    def setup_grouped_matmul(self) -> None:
        """The first product alone, with the rows in order already."""
        self._inputs(QWEN3, TOKENS)
        hidden_states, top_k_index, _ = self.routed
        self.rows = hidden_states.repeat(top_k_index.shape[1], 1) / 4
        self.counts = _count(top_k_index, QWEN3.experts)

    def benchmark_grouped_matmul(self) -> None:
        self.out = self._wait(self.kernel.grouped_matmul(self.rows, self.gate_up_proj.mT, self.counts))

    def verify_grouped_matmul(self) -> Tensor:
        return self._wait(_grouped_mm(self.rows, self.gate_up_proj.mT, self.counts))

    def setup_router(self) -> None:
        """Logits that are all different: torch leaves open which of two equal ones comes first."""
        order = torch.rand((TOKENS, QWEN3.experts), device=self.device).argsort(-1)
        self.logits = (order / QWEN3.experts).bfloat16()

    def benchmark_router(self) -> None:
        weights, experts = self.kernel.softmax_top_k(self.logits, QWEN3.choices)
        self.out = self._wait(weights + experts)  # both in one tensor: weights are below one

    def verify_router(self) -> Tensor:
        weights, experts = _softmax_top_k(self.logits, QWEN3.choices)
        return self._wait(weights + experts)

    def _inputs(self, sizes: Sizes, tokens: int, chosen_from: int | None = None) -> None:
        experts, hidden, intermediate, choices = sizes
        # so that a sum of products is about as large as what it is a sum of
        self.gate_up_proj = _small((experts, 2 * intermediate, hidden), self.device).mul_(2 * hidden**-0.5)
        self.down_proj = _small((experts, hidden, intermediate), self.device).mul_(2 * intermediate**-0.5)
        scores = torch.rand((tokens, chosen_from or experts), device=self.device)
        top_k_weights, top_k_index = _softmax_top_k(scores, choices)
        self.routed = _small((tokens, hidden), self.device), top_k_index, top_k_weights.bfloat16()

    def _wait(self, result: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return result


def _small(shape: tuple[int, ...], device: str) -> Tensor:
    """Results stay below one: `kernels` compares with atol=1e-2, and bfloat16 has steps of 2^-8 there."""
    return 2 * torch.rand(shape, dtype=torch.bfloat16, device=device) - 1


def _grouped_mm_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """grouped_mm_experts_forward of transformers 5.22.2, integrations/moe.py; weights are ``[E, K, N]``.

    With biases the gate is that of gpt-oss, otherwise that of Qwen3-MoE.
    """
    tokens, choices = top_k_index.shape
    expert_ids, perm = torch.sort(top_k_index.reshape(-1))
    counts = _count(expert_ids, gate_up.shape[0])
    expert_ids = expert_ids.clamp(max=gate_up.shape[0] - 1)  # rows of experts elsewhere are zero, and stay it
    proj_out = _grouped_mm(hidden_states[perm // choices], gate_up, counts)
    if gate_up_bias is None:
        gate, up = proj_out.chunk(2, dim=-1)
        proj_out = F.silu(gate) * up
    else:
        proj_out = _clipped_swiglu(proj_out + gate_up_bias[expert_ids])
    proj_out = _grouped_mm(proj_out, down, counts)
    if down_bias is not None:
        proj_out = proj_out + down_bias[expert_ids]
    weighted_out = proj_out * top_k_weights.reshape(-1)[perm].unsqueeze(-1)
    inv_perm = torch.empty_like(perm)
    inv_perm[perm] = torch.arange(perm.size(0), device=perm.device)
    return weighted_out[inv_perm].view(tokens, choices, -1).sum(dim=1)


def _grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """What torch.nn.functional.grouped_mm computes where a device has no operator for it; zeros after the groups."""
    sizes = counts.tolist()
    groups = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    after = rows.new_zeros(groups[-1].shape[0], weight.shape[2])
    return torch.cat([*(group @ expert for group, expert in zip(groups, weight)), after])


def _count(expert_ids: Tensor, experts: int) -> Tensor:
    """How many rows each expert gets; ids of ``experts`` and more are not counted."""
    return torch.bincount(expert_ids.reshape(-1), minlength=experts)[:experts]


def _clipped_swiglu(gate_up: Tensor) -> Tensor:
    """GptOssExperts._apply_gate of transformers 5.22.2, models/gpt_oss/modeling_gpt_oss.py."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=LIMIT)
    up = up.clamp(min=-LIMIT, max=LIMIT)
    glu = gate * torch.sigmoid(gate * ALPHA)
    return (up + 1) * glu


def _softmax_top_k(logits: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Qwen3MoeTopKRouter.forward of transformers 5.22.2, models/qwen3_moe/modeling_qwen3_moe.py, after its product."""
    router_probs = F.softmax(logits, dtype=torch.float, dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, choices, dim=-1)
    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    return router_top_value, router_indices
