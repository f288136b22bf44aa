"""Layers with adapters that a module calls with one input: one node while its forward runs, alone everywhere else."""

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import kernels_ext_npu
from kernels_ext_npu.syntax.shared_inputs import layers_of_one_input
from tests.integration.swaps.linear.test_adapted_layers import NAMES, TOGETHER, Attention, X, assert_same, pair, reasons
from tests.support import zoo


@pytest.fixture(autouse=True)
def _registered() -> None:
    kernels_ext_npu.register(kernels=["Linear"])


def find_attention(model: nn.Module) -> Attention:
    return next(module for module in model.modules() if isinstance(module, Attention))


class Around(nn.Module):
    """Stands around a layer since kernels were swapped in, and changes its input before it calls."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 2)


def hooked(attention: Attention) -> None:
    attention.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    attention.v_proj.register_forward_hook(lambda module, args, y: y + 1)


def surrounded(attention: Attention) -> None:
    attention.k_proj = Around(attention.k_proj)


def exchanged(attention: Attention) -> None:
    torch.manual_seed(1)
    attention.k_proj = nn.Linear(16, 8).to(attention.q_proj.weight.device)


@pytest.mark.parametrize("change", [hooked, surrounded, exchanged])
def test_a_layer_that_is_changed_later_is_computed_as_it_is(change: Callable[[Attention], None]) -> None:
    """After a look at kernels, layers whose group another one has left are computed by themselves."""
    model, original = pair()
    for each in (model, original):
        change(find_attention(each))
    assert_same(model, original)
    kernels_ext_npu.kernelize(model)
    if change is exchanged:
        assert not any(reasons(model)[name] for name in ("q_proj", "v_proj", "o_proj"))
        assert "forward" not in vars(find_attention(model))
    assert_same(model, original)


@torch.no_grad()
def test_layers_that_are_called_by_somebody_else_are_computed_by_themselves() -> None:
    model, original = pair()
    found, expected, x = find_attention(model), find_attention(original), X.npu()
    torch.testing.assert_close(found.q_proj(x).cpu(), expected.q_proj(X), rtol=1e-4, atol=1e-5)
    for each in (found, expected):
        each.k_proj.base_layer.weight.data.mul_(2)  # which no version counts
    torch.testing.assert_close(found.k_proj(x).cpu(), expected.k_proj(X), rtol=1e-4, atol=1e-5)


def test_an_interrupted_forward_leaves_no_results_to_the_next() -> None:
    model, original = pair()

    def stop(module, args):
        raise KeyboardInterrupt

    x = X.npu()
    handle = find_attention(model).v_proj.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    assert_same(model, original)
    with torch.no_grad():
        x.add_(1)
        torch.testing.assert_close(model(x).cpu(), original(X + 1), rtol=1e-4, atol=1e-5)


def test_a_forward_that_the_class_gets_later_is_the_one_that_runs(monkeypatch) -> None:
    model, original = pair()
    monkeypatch.setattr(Attention, "forward", lambda self, x: self.k_proj(x) - self.q_proj(x)[..., :8])
    assert_same(model, original)


def test_threads_share_no_results_of_adapters() -> None:
    model, original = pair()
    expected = original(X).detach()
    failures = []

    def run() -> None:
        found = [model(X.npu()).detach().cpu() for _ in range(5)]
        failures.extend(y for y in found if not torch.allclose(y, expected, atol=1e-5))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_copy_and_a_pickle_are_what_the_model_is() -> None:
    model, original = pair()
    copied, expected = copy.deepcopy(model), copy.deepcopy(original)
    for each in (copied, expected):
        find_attention(each).k_proj.base_layer.weight.data.zero_()
    assert_same(copied, expected)
    assert_same(model, original)
    unpickled = pickle.loads(pickle.dumps(model))
    assert not any("forward" in vars(module) for module in unpickled.modules())
    assert_same(kernels_ext_npu.kernelize(unpickled), original)
    assert reasons(unpickled)["q_proj"] == TOGETHER


class Changing(Attention):
    """Changes its input between two calls, so that nobody counts it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        query = self.q_proj(hidden_states)
        hidden_states.data.mul_(2)
        return query + self.k_proj(hidden_states).repeat(1, 1, 3) + self.v_proj(hidden_states).repeat(1, 1, 3)


@torch.no_grad()
def test_an_input_that_is_changed_between_two_calls_is_multiplied_as_it_is() -> None:
    model, original = pair(base=Changing)
    torch.testing.assert_close(model(X.npu()).cpu(), original(X.clone()), rtol=1e-4, atol=1e-5)


class Siblings(nn.Module):
    """Calls of which only a few are of one input for sure."""

    def forward(self, x: Tensor, y: Tensor, flag: bool) -> Tensor:
        a = self.a(x)
        b = self.b(x) if flag else y
        if flag:
            b = self.c(x)
        d = self.d(y)
        x = self.e(x)
        f = self.f(x)
        return a + b + d + self.g(y) + f + self.h(f) + self.h(f)


def test_layers_of_one_input_are_those_that_every_branch_calls_once() -> None:
    assert layers_of_one_input(Siblings()) == (("d", "g"),)
    assert layers_of_one_input(Attention()) == (("q_proj", "k_proj", "v_proj"),)
    assert layers_of_one_input(zoo.build("qwen3").model.layers[0].self_attn) == (("q_proj", "k_proj", "v_proj"),)


def test_what_is_no_layer_with_adapters_is_torchs_own() -> None:
    """Plain layers of a model, trained or not: no forward of theirs is touched, and the report says why."""
    config = LoraConfig(r=4, target_modules=NAMES[:1], init_lora_weights=False)
    model = kernels_ext_npu.kernelize(get_peft_model(Attention(), config).npu())
    found = reasons(model)
    assert found.pop("q_proj") is None
    assert set(found) == set(NAMES[1:])
    assert set(found.values()) == {
        "torch_npu's operator computes it: a kernel of its own would gain less than 1% of a step"
    }
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["base_model.model.q_proj"]


def test_a_linear_layer_of_another_class_is_not_said_to_be_torchs_own() -> None:
    class OfSigns(nn.Linear):
        def forward(self, x):
            return x @ self.weight.sign().T

    class Renamed(nn.Linear):
        pass

    model = kernels_ext_npu.kernelize(nn.ModuleDict({"signs": OfSigns(4, 4), "renamed": Renamed(4, 4)}).npu())
    found = reasons(model)
    assert found["signs"].endswith("OfSigns, which may compute something else")
    assert "torch_npu's operator computes it" in found["renamed"]
