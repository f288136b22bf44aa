"""Counted: what mixtures of experts launch, move and hold, against transformers and against LLaMA-Factory's scheme."""

from collections.abc import Callable
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from tests.support import llama_factory, memory
from tests.support.costs import costs

pytestmark = pytest.mark.usefixtures("frozen")

# with 1024 words in place of 151936: the embedding is nobody's kernel
QWEN3_30B_A3B = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_hidden_layers": 2, "vocab_size": 1024,
}  # fmt: skip


def with_experts(forward: Callable) -> Callable[[nn.Module], None]:
    """Kernels for everything but the experts: what differs is the experts alone."""

    def prepare(model: nn.Module) -> None:
        kernels_ext_npu.kernelize(model)
        for module in model.modules():
            if isinstance(module, Qwen3MoeExperts):
                module.forward = MethodType(forward, module)

    return prepare


def gigabytes(cost: Cost) -> float:
    return cost.bytes.total() / 1e9


def test_a_model_launches_and_moves_half_of_what_it_did_and_a_block_what_it_must(registered) -> None:
    ours = costs(kernels_ext_npu.kernelize, "qwen3_moe", 4096, **QWEN3_30B_A3B)
    theirs = costs(with_experts(llama_factory.experts), "qwen3_moe", 4096, **QWEN3_30B_A3B)
    kernels_ext_npu.unregister()
    original = costs(lambda model: None, "qwen3_moe", 4096, **QWEN3_30B_A3B)
    # transformers' own: 5.23 launches two more in each
    assert original[0].launches.total() >= 187
    assert original[1].launches.total() >= 452
    assert [round(gigabytes(cost), 1) for cost in original] == [11.7, 40.8]
    assert ours[0].launches.total() <= 60
    assert gigabytes(ours[0]) <= 5.52
    assert ours[1].launches.total() <= 143
    assert gigabytes(ours[1]) <= 17.17
    for mine, other in zip(ours, theirs):
        assert mine.launches.total() < other.launches.total()
        assert gigabytes(mine) < gigabytes(other)
    # what each of the launches of a layer is for; with a gradient nothing copies a weight or its gradient
    (forward, training), layers = ours, QWEN3_30B_A3B["num_hidden_layers"]
    names = {"npu_moe_token_permute", "npu_moe_token_unpermute", "histc", "npu_moe_gating_top_k_softmax"}
    assert {name: forward.launches[name] / layers for name in names} == dict.fromkeys(names, 1)
    assert forward.launches["npu_grouped_matmul"] == 2 * layers
    assert forward.launches["npu_swiglu"] == layers
    # forward, four gradients of products; tokens and gate once more, but not in the layer that ran last
    assert training.launches["npu_grouped_matmul"] == 6 * layers
    assert training.launches["npu_moe_token_permute"] == training.launches["npu_swiglu"] == 2 * layers - 1
    experts = 2 * QWEN3_30B_A3B["num_experts"] * QWEN3_30B_A3B["hidden_size"] * QWEN3_30B_A3B["moe_intermediate_size"]
    copied = sum(training.bytes[name] for name in ("copy_", "clone", "contiguous", "_to_copy"))
    assert copied < 2 * experts  # the gradient of one projection alone would be as much


SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 32,
}  # fmt: skip
TOKENS = 1024


def peak(prepare: Callable[[nn.Module], object]) -> int:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to("npu").train()
    prepare(model)
    return memory.peak(model, torch.arange(TOKENS, device="npu").view(4, -1) % SIZES["vocab_size"])


def test_a_training_step_holds_less_than_transformers_and_the_nodes(registered) -> None:
    ours = peak(kernels_ext_npu.kernelize)
    theirs = peak(with_experts(llama_factory.experts))
    grouped = peak(with_experts(grouped_mm_experts_forward))
    kernels_ext_npu.unregister()
    original = peak(lambda model: None)
    # For each layer but the last the nodes keep the tokens and what the gate makes of them besides. Within the last one
    # they free what they kept one after the other, one node all at its end: a tensor of the inner size more.
    rows, inner = TOKENS * SIZES["num_experts_per_tok"] * 4, SIZES["moe_intermediate_size"]
    kept = (SIZES["num_hidden_layers"] - 1) * rows * (SIZES["hidden_size"] + inner)
    weights = SIZES["num_experts"] * 3 * SIZES["hidden_size"] * inner * 4
    assert ours <= theirs - kept + rows * inner + weights
    assert ours < grouped < original


def test_frozen_experts_hold_less_still(registered) -> None:
    """As with adapters elsewhere: no weight has a gradient, and nothing is kept for one."""

    def freeze(model: nn.Module) -> None:
        kernels_ext_npu.kernelize(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)

    assert peak(freeze) < peak(kernels_ext_npu.kernelize)
