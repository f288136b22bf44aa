"""Layers whose heads of values share a query and a key, which transformers repeats before a gated delta rule."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.swaps import functions
from kernels_ext_npu.swaps.decision import View
from kernels_ext_npu.syntax.repeated_heads import without_repeats
from tests.support import npu_counts, zoo
from tests.support.nearness import assert_gradients_near, assert_near, gradients
from tests.support.served import kernelized

pytestmark = pytest.mark.usefixtures("registered")

NAMES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "conv1d")]


def repeats(model: PreTrainedModel, name: str) -> int:
    """Count what is repeated in a forward and backward of a row."""
    npu_counts.reset()
    zoo.logits(name, model, use_cache=False).square().mean().backward()
    return npu_counts.read().get("repeat_interleave", 0)


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_shared_and_not_repeated(name: str) -> None:
    """Two heads of values have one query and one key. transformers' own model is the truth."""
    original, model = zoo.build(name).train(), kernelized(name).train()
    assert len(mixers(model)) > 0
    assert repeats(model, name) == 0
    zoo.logits(name, original, use_cache=False).square().mean().backward()
    assert_gradients_near(gradients(model), gradients(original))


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_repeated_again_once_the_delta_rule_is_restored(name: str) -> None:
    """A function goes back for all models of a process, of which others keep their forwards."""
    model = kernelized(name).train()
    shared = zoo.logits(name, model, use_cache=False)
    functions.revert(View(model))
    assert repeats(model, name) == 2 * len(mixers(model))
    assert_near(zoo.logits(name, model, use_cache=False), shared)
    kernels_ext_npu.kernelize(model)
    assert repeats(model, name) == 0
    kernels_ext_npu.restore(model)
    assert not any("forward" in vars(mixer) for mixer in mixers(model))


def test_hooks_of_accelerate_run_around_the_rewritten_forward() -> None:
    """Whose decorator transformers puts around these forwards, since they call no forward of their convolution."""
    calls = []

    class Hook:
        pre_forward = staticmethod(lambda module: calls.append("before"))
        post_forward = staticmethod(lambda module, output: calls.append("behind"))

    model = kernelized("qwen3_next").eval()
    mixer = mixers(model)[0]
    mixer.conv1d._hf_hook = Hook()
    mixer(torch.randn(1, 3, model.config.hidden_size).npu())
    assert calls == ["before", "behind"]


# ---- forwards that are written anew, and others ----------------------------------------------------------------------
class Layer:
    """What a forward here knows of its heads."""

    heads, groups = 4, 2


def rule(query, key, value):
    return query.shape[2], key.shape[2], value.shape[2]


def as_transformers(self, query, key, value):
    if self.heads // self.groups > 1:
        query = query.repeat_interleave(self.heads // self.groups, dim=2)
        key = key.repeat_interleave(self.heads // self.groups, dim=2)
    return rule(query, key, value)


def with_a_name(self, q, k, value):
    if self.heads > self.groups:
        ratio = self.heads // self.groups
        q = q.repeat_interleave(ratio, dim=2)
        k = k.repeat_interleave(ratio, dim=2)
    if value.shape[1] == 1:
        return rule(q, k, value)
    return rule(q, k, value=value)


def read_again(self, query, key, value):
    if self.heads // self.groups > 1:
        query = query.repeat_interleave(self.heads // self.groups, dim=2)
        key = key.repeat_interleave(self.heads // self.groups, dim=2)
    return rule(query, key, value), key.shape


def exchanged(self, query, key, value):
    if self.heads // self.groups > 1:
        query = query.repeat_interleave(self.heads // self.groups, dim=2)
        key = key.repeat_interleave(self.heads // self.groups, dim=2)
    return rule(key, query, value)


@pytest.mark.parametrize("forward", [as_transformers, with_a_name])
def test_a_forward_that_repeats_heads_for_the_delta_rule_alone_is_rewritten(forward) -> None:
    query, value = torch.ones(1, 3, 2, 5), torch.ones(1, 3, 4, 5)
    assert forward(Layer(), query, query, value) == (4, 4, 4)
    assert without_repeats(forward, frozenset({"rule"}))(Layer(), query, query, value) == (2, 2, 4)


@pytest.mark.parametrize("forward", [read_again, exchanged, rule])
def test_a_forward_that_uses_repeated_heads_otherwise_is_left_alone(forward) -> None:
    assert without_repeats(forward, frozenset({"rule"})) is None
