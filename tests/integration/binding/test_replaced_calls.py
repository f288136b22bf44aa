"""What somebody puts in the place of torch's own calls is called where no module is: lists of experts, and graphs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
from kernels_ext_npu.selftest.layers.moe_blocks_v4 import Qwen3MoeSparseMoeBlock
from tests.fused_moe import expert_modules
from tests.support import zoo
from tests.support.nearness import assert_near


def scaling(original: Callable, watched: type[nn.Module]) -> Callable:
    """A call or forward that gives more than the original, of one class."""

    def scaled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return 1.25 * result if type(self) is watched else result

    return scaled


@pytest.mark.parametrize(
    ("owner", "attribute"), [(nn.Linear, "__call__"), (nn.Module, "__call__"), (nn.Linear, "forward")]
)
def test_lists_of_experts_call_what_replaces_a_call_of_torch(
    registered, monkeypatch, owner: type[nn.Module], attribute: str
) -> None:
    original = expert_modules.block(Qwen3MoeSparseMoeBlock)
    model = kernels_ext_npu.kernelize(nn.ModuleDict({"block": copy.deepcopy(original)}).to("npu"))
    x = expert_modules.block_inputs()
    monkeypatch.setattr(owner, attribute, scaling(getattr(owner, attribute), nn.Linear), raising=False)
    expected = original(x)[0]
    assert_near(model["block"](x.npu())[0], expected)


class Cubed(nn.Module):
    """An activation that no call has seen."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


@pytest.mark.parametrize(("name", "part"), [("llama", "MLP"), ("phi3", "MLP"), ("qwen3_moe", "SparseMoeBlock")])
def test_a_graph_calls_an_activation_that_was_not_seen_before(registered, name: str, part: str) -> None:
    """One that computes a unit at once, one with halves of a product, and experts."""
    torch._dynamo.reset()
    blocks = []
    for model in (zoo.build(name), kernels_ext_npu.kernelize(zoo.build(name).to("npu"))):
        block = next(module for module in model.modules() if type(module).__name__.endswith(part))
        for module in block.modules():
            for member in {"act_fn", "activation_fn"} & module._modules.keys():
                setattr(module, member, Cubed())
        blocks.append(block)
    x = torch.randn(2, 5, next(blocks[0].parameters()).shape[-1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_near(torch.compile(blocks[1], backend="aot_eager")(x.npu()), blocks[0](x))
