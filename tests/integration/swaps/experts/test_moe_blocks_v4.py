"""Mixtures of experts with a list of experts in a model: found, swapped, packed, reported, and given back."""

import copy

import accelerate
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import kernels_ext_npu
from kernels_ext_npu.selftest.layers.moe_blocks_v4 import (
    DeepseekV2MoE,
    MixtralSparseMoeBlock,
    Qwen2MoeSparseMoeBlock,
    Qwen3MoeSparseMoeBlock,
)
from tests.fused_moe.expert_modules import block, block_inputs
from tests.fused_moe.list_blocks import assert_close, each_block, results
from tests.support import npu_counts

pytestmark = pytest.mark.usefixtures("registered")


def find_row(model: nn.Module) -> kernels_ext_npu.Row:
    (row,) = [row for row in kernels_ext_npu.report(model) if row.kernel in ("SparseMoEBlock", "GatedMoEBlock")]
    return row


def in_a_model(module: nn.Module) -> nn.Module:
    return kernels_ext_npu.kernelize(nn.ModuleDict({"block": copy.deepcopy(module)}).to("npu"))


@pytest.mark.parametrize("mode", ["training", "inference"])
@each_block
def test_a_block_computes_what_it_did_and_restored_it_is_the_original_again(cls, mode) -> None:
    """Names and values of weights stay."""
    original = nn.ModuleDict({"block": block(cls).train(mode == "training")})
    model = in_a_model(original["block"])
    assert (find_row(model).swapped, find_row(model).reason, find_row(model).kind) == (True, None, "experts")
    npu_counts.reset()
    found = results(model["block"], block_inputs().npu())
    counters = npu_counts.read()
    assert counters["stream_syncs"] == 0
    assert counters["npu_grouped_matmul"] == 6
    assert counters["npu_swiglu"] >= 1
    for again in (found, results(model["block"], block_inputs().npu())):
        assert_close(again, results(original["block"], block_inputs()))
    states = [model.state_dict(), copy.deepcopy(model).state_dict()]
    kernels_ext_npu.restore(model)
    assert not find_row(model).swapped
    for found in (*states, model.state_dict()):
        assert list(found) == list(original.state_dict())
        assert all(torch.equal(found[name].cpu(), value) for name, value in original.state_dict().items())
    npu_counts.reset()
    found = results(model["block"], block_inputs().npu())
    assert "npu_grouped_matmul" not in npu_counts.read()
    assert_close(found, results(original["block"], block_inputs()))


def lora(module: nn.Module) -> nn.Module:
    config = LoraConfig(target_modules=r".*experts\.\d+\.up_proj", init_lora_weights=False)
    torch.manual_seed(1)
    return inject_adapter_in_model(config, module)


def test_experts_with_lora_keep_their_forward() -> None:
    adapted = lora(block(Qwen3MoeSparseMoeBlock))
    model = in_a_model(adapted)
    assert not find_row(model).swapped
    assert find_row(model).reason.startswith("a projection of an expert is a peft.tuners.lora.layer.Linear")
    assert_close(results(model["block"], block_inputs().npu()), results(adapted, block_inputs()))


def offloaded(module: nn.Module) -> nn.Module:
    for expert in module.experts:
        accelerate.hooks.add_hook_to_module(expert, accelerate.hooks.AlignDevicesHook("npu:0"))
    return module


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lora, "a projection is a peft.tuners.lora.layer.Linear"),
        (offloaded, "an expert has hooks or a wrapped forward, which one product would pass by"),
    ],
)
def test_changes_of_a_block_after_the_swap_take_effect_and_are_reported(change, reason) -> None:
    original = block(Qwen3MoeSparseMoeBlock)
    model = in_a_model(original)
    change(model["block"])
    assert (find_row(model).swapped, find_row(model).reason) == (True, f"expert by expert, since {reason}")
    npu_counts.reset()
    found = results(model["block"], block_inputs().npu())
    assert "npu_grouped_matmul" not in npu_counts.read()
    expected = results(lora(original) if change is lora else original, block_inputs())
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("cls", "change", "reason"),
    [
        (
            Qwen2MoeSparseMoeBlock,
            lambda block: setattr(block.experts, "2", nn.Identity()),
            "an expert is a Identity, whose forward is not that of a gated MLP",
        ),
        (MixtralSparseMoeBlock, lambda block: block.experts.pop(5), "its gate chooses among 6 experts, and it has 5"),
        (DeepseekV2MoE, lambda block: setattr(block, "ep_rank", 1), "it has the experts of rank 1 only"),
    ],
)
def test_blocks_beyond_the_limits_of_their_pattern_keep_their_forward_and_say_why(cls, change, reason) -> None:
    built = block(cls, experts=6)
    change(built)
    assert (find_row(in_a_model(built)).swapped, find_row(in_a_model(built)).reason) == (False, reason)
