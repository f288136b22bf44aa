"""What somebody puts in the place of torch's own calls and forwards is called by a model with kernels, too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
from kernels_ext_npu.patterns.moe.moe_blocks_v4 import Qwen3MoeSparseMoeBlock
from tests.support import expert_modules, zoo
from tests.support.nearness import assert_near, gradients


def scaling(original: Callable, watched: type[nn.Module]) -> Callable:
    """A call or forward that gives more than the original, of one class."""

    def scaled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return 1.25 * result if type(self) is watched else result

    return scaled


def build(name: str) -> nn.Module:
    """A model whose activations are torch's own modules."""
    model = zoo.build(name).eval()
    for module in model.modules():
        if "act_fn" in module._modules:
            module.act_fn = nn.SiLU()
    return model


def results(model: nn.Module, name: str) -> list[Tensor]:
    """The loss, and all gradients in one tensor."""
    model.zero_grad()
    inputs = zoo.inputs(name, model)
    labels = inputs["input_ids"]
    if "attention_mask" in inputs:  # what is computed of padding is nobody's business
        labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    return [loss.detach().cpu(), torch.cat([gradient.cpu().flatten() for gradient in gradients(model).values()])]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)


# where something is put, and the class that it changes
PLACES = {
    "calls of linear layers": (nn.Linear, "__call__", nn.Linear),
    "calls of all modules": (nn.Module, "__call__", nn.Linear),
    "forward of linear layers": (nn.Linear, "forward", nn.Linear),
    "calls of layer norms": (nn.LayerNorm, "__call__", nn.LayerNorm),
    "forward of layer norms": (nn.LayerNorm, "forward", nn.LayerNorm),
    "calls of activations": (nn.SiLU, "__call__", nn.SiLU),
}
# a head, and products of gate and up; the norm of a sum; activations of MLPs and of experts
MODELS = {nn.Linear: ("llama",), nn.LayerNorm: ("bert",), nn.SiLU: ("llama", "qwen3_moe")}


@pytest.mark.parametrize(("place", "name"), [(place, name) for place in PLACES for name in MODELS[PLACES[place][2]]])
def test_what_stands_in_the_place_of_a_call_is_called(registered, monkeypatch, place: str, name: str) -> None:
    owner, attribute, watched = PLACES[place]
    original = build(name)
    model = kernels_ext_npu.kernelize(build(name).to("npu"))
    before = results(model, name)
    assert_equal(before, results(original, name))
    monkeypatch.setattr(owner, attribute, scaling(getattr(owner, attribute), watched), raising=False)
    expected = results(original, name)
    assert (expected[0] - before[0]).abs() > 1e-4  # it does change something
    assert_equal(results(model, name), expected)
    kernels_ext_npu.kernelize(model)
    assert_equal(results(model, name), expected)
    monkeypatch.undo()
    kernels_ext_npu.kernelize(model)
    assert_equal(results(model, name), before)


@pytest.mark.parametrize(
    ("owner", "attribute"), [(nn.Linear, "__call__"), (nn.Module, "__call__"), (nn.Linear, "forward")]
)
def test_lists_of_experts_call_it(registered, monkeypatch, owner: type[nn.Module], attribute: str) -> None:
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
