"""Blocks with a list of experts: what is left to the original, and that nothing is left behind."""

import re
from types import ModuleType

import pytest
import torch
from torch import nn

from kernels_ext_npu.selftest.layers.moe_blocks_v4 import DeepseekV3MoE, MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock
from tests.fused_moe.expert_modules import block, block_inputs
from tests.fused_moe.list_blocks import assert_close, bound, each_block, results
from tests.support import npu_counts

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def hook(module: nn.Module) -> None:
    module.experts[1].down_proj.register_forward_hook(lambda linear, arguments, y: 2 * y)


def one_bias(module: nn.Module) -> None:
    linear = module.experts[1].up_proj
    linear.bias = nn.Parameter(torch.ones(linear.out_features, device=linear.weight.device))


def other_activation(module: nn.Module) -> None:
    module.experts[1].act_fn = nn.ReLU()


MISFITS = {
    hook: "a projection has hooks or a wrapped forward",
    one_bias: "only some experts have a bias",
    other_activation: "the experts differ in their activation",
}


@pytest.mark.parametrize("change", MISFITS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("cls", [Qwen3MoeSparseMoeBlock, DeepseekV3MoE], ids=lambda cls: cls.__name__)
def test_what_does_not_fit_is_computed_by_the_original_and_the_reason_is_known(
    kernel, npu_counters, cls, change
) -> None:
    original = block(cls)
    module = bound(kernel, original)
    assert kernel.expert_lists.unfit(module) is None
    change(original)
    change(module)
    assert re.search(MISFITS[change], kernel.expert_lists.unfit(module))
    found = results(module, block_inputs().npu())
    assert "npu_grouped_matmul" not in npu_counters()
    assert_close(found, results(original, block_inputs()))


@each_block
def test_the_cpu_and_autocast_to_another_dtype_are_left_to_the_original(kernel: ModuleType, npu_counters, cls) -> None:
    original = block(cls)
    module = bound(kernel, original)
    assert_close(results(module.cpu(), block_inputs()), results(original, block_inputs()))
    module = bound(kernel, original)
    with torch.autocast("npu", torch.bfloat16), torch.no_grad():
        module(block_inputs().npu())
    assert "npu_grouped_matmul" not in npu_counters()


@pytest.mark.parametrize("cls", [Qwen3MoeSparseMoeBlock, MixtralSparseMoeBlock], ids=lambda cls: cls.__name__)
def test_autocast_to_the_dtype_of_the_weights_changes_nothing(kernel: ModuleType, npu_counters, cls) -> None:
    """As the Trainer runs a model that was loaded in bfloat16. DeepSeek's gate asks for float32 and does not get it."""
    original = block(cls).to(torch.bfloat16)
    x = block_inputs(24, torch.bfloat16).npu()
    expected = results(bound(kernel, original), x)
    npu_counts.reset()
    with torch.autocast("npu", torch.bfloat16):
        found = results(bound(kernel, original), x)
    assert npu_counters()["npu_grouped_matmul"] == 6
    for a, b in zip(found, expected):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
