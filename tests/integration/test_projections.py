"""Plain linear layers of models: served where a gradient of their weight is wanted, and left alone everywhere else."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import kernels_ext_npu
import softnpu
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.swapping import ahead
from kernels_ext_npu.swapping.siblings import siblings_in
from tests.support import zoo
from tests.support.agreement import TOLERANCE, assert_agrees


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    kernels_ext_npu.register(kernels=["Linear"])
    yield
    kernels_ext_npu.unregister()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output of a module, and the gradients of its weights."""
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_same(model: nn.Module, original: nn.Module, x: Tensor) -> None:
    for found, expected in zip(step(model, x.npu()), step(original, x), strict=True):
        assert (found.cpu() - expected).norm() <= TOLERANCE * expected.norm().clamp(min=1e-6)


class Attention(nn.Module):
    """Projections of one input, as transformers calls them, and one of what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 24), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o_proj = nn.Linear(24, 16, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        query = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, 8)
        key = self.k_proj(hidden_states).tanh()
        value = self.v_proj(hidden_states)
        return self.o_proj((query * (key + value).unsqueeze(-2)).flatten(-2))


def pair() -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    original = Attention()
    return kernels_ext_npu.kernelize(copy.deepcopy(original).npu()), original


X = torch.linspace(-1, 1, 64 * 16).view(2, 32, 16).sin()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "bert", "qwen3_moe", "t5gemma"])
def test_a_model_is_what_it_was(name: str) -> None:
    model = kernels_ext_npu.kernelize(zoo.build(name).to("npu"))
    rows = kernels_ext_npu.report(model).projections
    assert {row.path for row in rows if row.swapped} == {
        path for path, module in model.named_modules() if type(module) is nn.Linear
    }
    softnpu.reset_counters()
    assert_agrees(name, model)
    assert softnpu.counters()["npu_linear_backward"] > 0


def test_no_weight_gradient_is_copied_and_projections_of_one_input_are_one_node() -> None:
    model, original = pair()
    reasons = {row.path: row.reason for row in kernels_ext_npu.report(model).projections}
    together = "one node with q_proj, k_proj, v_proj"
    assert reasons == {"q_proj": together, "k_proj": together, "v_proj": together, "o_proj": None}
    assert "→ linear: one node with" in str(kernels_ext_npu.report(model))
    assert_same(model, original, X)
    with Cost() as cost:
        step(model, X.npu())
    assert not cost.launches["copy_"]
    assert cost.launches["npu_linear_backward"] == 1  # that of o_proj: the input needs no gradient


def test_gradients_are_taken_over_by_buffers_as_they_come() -> None:
    """As Megatron's optimisers do: a hook adds each gradient to a ``main_grad`` in float32, and lets it go.

    In bfloat16, of two batches: what is added is rounded once, relative to the norm of the gradient.
    """
    model, original = pair()
    model.to(torch.bfloat16)
    for weight in model.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

        def take_over(weight: Tensor) -> None:
            weight.main_grad.add_(weight.grad)
            weight.grad = None

        weight.register_post_accumulate_grad_hook(take_over)
    original.load_state_dict({name: value.cpu().float() for name, value in model.state_dict().items()})
    with Cost() as cost:
        for x in (X, X.flip(1)):
            model(x.npu().bfloat16()).float().square().mean().backward()
    for x in (X, X.flip(1)):
        original(x.bfloat16().float()).square().mean().backward()
    assert not cost.launches["copy_"]
    for found, expected in zip(model.parameters(), original.parameters(), strict=True):
        assert found.grad is None
        assert (found.main_grad.cpu() - expected.grad).norm() <= 2.0**-6 * expected.grad.norm()


def test_gradients_accumulate_in_what_the_first_backward_gave() -> None:
    """Also where those of several layers lie in one storage: nothing of another layer's is written."""
    model, original = pair()
    for each, device in ((model, "npu"), (original, "cpu")):
        each(X.to(device)).square().mean().backward()
    first = [weight.grad.data_ptr() for weight in model.parameters()]
    for each, device in ((model, "npu"), (original, "cpu")):
        each(X.flip(1).to(device)).square().mean().backward()
    assert [weight.grad.data_ptr() for weight in model.parameters()] == first
    for found, expected in zip(model.parameters(), original.parameters(), strict=True):
        assert (found.grad.cpu() - expected.grad).norm() <= TOLERANCE * expected.grad.norm()


def test_without_gradients_of_weights_nothing_changes() -> None:
    model, original = pair()
    plain = original.npu()
    for each in (model, plain):
        each.requires_grad_(False)
    for enabled in (False, True):
        x = X.npu().requires_grad_(enabled)
        found = []
        for each in (model, plain):
            with torch.set_grad_enabled(enabled), Cost() as cost:
                y = each(x)
                if enabled:
                    y.sum().backward()
            found.append(dict(cost.launches))
        found[1].pop("add_", None)  # to the gradient that x has by then
        assert {k: v for k, v in found[0].items() if k != "add_"} == found[1]


def test_restore_gives_every_layer_back() -> None:
    model, original = pair()
    assert_same(kernels_ext_npu.restore(model), original, X)
    assert not any("forward" in vars(module) for module in model.modules())
    rows = kernels_ext_npu.report(model).projections
    assert {row.reason for row in rows} == {
        "restore() was called for this part of the model: kernelize() swaps kernels into it again"
    }


def test_a_copy_and_a_pickle_are_what_the_model_is() -> None:
    model, original = pair()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.k_proj.weight.zero_()
        expected = copy.deepcopy(original)
        expected.k_proj.weight.zero_()
    assert_same(copied, expected, X)
    assert_same(model, original, X)
    unpickled = pickle.loads(pickle.dumps(model))
    assert not any("forward" in vars(module) for module in unpickled.modules())
    assert_same(kernels_ext_npu.kernelize(unpickled), original, X)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_and_change_what_they_did(when: str) -> None:
    model, original = pair()
    if when == "before":
        kernels_ext_npu.restore(model)
    for each in (model, original):
        each.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        each.v_proj.register_forward_hook(lambda module, args, y: y + 1)
        each.q_proj.register_full_backward_hook(lambda module, grads, _: None)
    kernels_ext_npu.kernelize(model)
    reasons = {row.path: row.reason for row in kernels_ext_npu.report(model).projections}
    assert reasons.pop("o_proj") is None
    assert set(reasons.values()) == {"hooks watch its calls"}
    assert_same(model, original, X)


def test_hooks_that_come_later_see_and_change_what_they_did() -> None:
    model, original = pair()
    for each in (model, original):
        each.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        each.v_proj.register_forward_hook(lambda module, args, y: y + 1)
    assert_same(model, original, X)


def test_layers_that_are_called_otherwise_are_computed_by_themselves() -> None:
    model, original = pair()
    x = X.npu()
    torch.testing.assert_close(model.q_proj(x).cpu(), original.q_proj(X))
    with torch.no_grad():
        for each in (model, original):
            each.k_proj.weight.data.mul_(2)  # which no version counts
    torch.testing.assert_close(model.k_proj(x).cpu(), original.k_proj(X))
    assert ahead._ahead.computed is None


def test_a_layer_that_was_put_in_the_place_of_another_is_computed_and_the_other_is_not() -> None:
    model, original = pair()
    first = model.k_proj  # which somebody keeps
    for each in (model, original):
        torch.manual_seed(1)
        each.k_proj = nn.Linear(16, 8).to(each.q_proj.weight.device)
    assert_same(model, original, X)
    assert first.weight.grad is None
    assert ahead._ahead.computed is None  # it would keep a graph of autograd
    model.half()  # not the first one, which could not be multiplied with this input
    assert model(X.npu().half()).isfinite().all()
    kernels_ext_npu.kernelize(model)
    assert {row.reason for row in kernels_ext_npu.report(model).projections} == {
        None,
        "one node with q_proj, k_proj, v_proj",
    }


def test_a_forward_that_ends_in_between_leaves_nothing_to_the_next() -> None:
    model, original = pair()
    broken = copy.deepcopy(model.k_proj)
    model.k_proj, k_proj = broken, model.k_proj  # not what was computed ahead
    assert_same(model, original, X)
    model.k_proj = k_proj

    def stop(module, args):
        raise KeyboardInterrupt

    x = X.npu()
    handle = model.v_proj.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    assert_same(model, original, X)
    x.add_(1)
    torch.testing.assert_close(model(x).cpu(), original(X + 1), rtol=1e-4, atol=1e-5)


def test_threads_do_not_hand_each_other_anything() -> None:
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


def test_frozen_and_weights_of_another_kind_are_as_before() -> None:
    model, original = pair()
    for each in (model, original):
        each.k_proj.weight.requires_grad_(False)
    x = X.npu()
    (model(x).square().mean()).backward()
    (original(X).square().mean()).backward()
    assert model.k_proj.weight.grad is None
    torch.testing.assert_close(model.q_proj.weight.grad.cpu(), original.q_proj.weight.grad)
    for each in (model, original):
        each.requires_grad_(True)
        parametrizations.weight_norm(each.q_proj)
    assert_same(model, original, X)


def test_what_is_no_plain_layer_says_why() -> None:
    class Own(nn.Linear):
        pass

    model = Attention()
    model.k_proj = Own(16, 8)
    quantize_(model.q_proj, Int8WeightOnlyConfig())
    kernels_ext_npu.kernelize(model.npu())
    reasons = {row.path: row.reason for row in kernels_ext_npu.report(model).projections}
    assert "Own, which may compute something else" in reasons["k_proj"]
    assert "the kernel multiplies with numbers alone" in reasons["q_proj"]
    assert reasons["v_proj"] is None


def test_gradients_add_up_over_backwards_as_in_torch() -> None:
    model, original = pair()
    for each, x in ((model, X.npu()), (original, X)):
        for _ in range(3):
            each(x).square().mean().backward()
    for found, expected in zip(model.parameters(), original.parameters()):
        torch.testing.assert_close(found.grad.cpu(), expected.grad)


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


class Around(nn.Module):
    """Stands around a layer since kernels were swapped in, and changes its input, or its weight, before it calls."""

    def __init__(self, layer: nn.Linear, what: str) -> None:
        super().__init__()
        self.layer, self.what = layer, what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "weight":
            with torch.no_grad():
                self.layer.weight.mul_(2)
            return self.layer(x)
        return self.layer(x * 2)


@pytest.mark.parametrize("what", ["input", "weight"])
def test_a_layer_that_is_called_with_something_else_than_was_expected_is_computed_with_that(what: str) -> None:
    model, original = pair()
    for each in (model, original):
        each.k_proj = Around(each.k_proj, what)
    torch.testing.assert_close(model(X.npu()).cpu(), original(X), rtol=1e-4, atol=1e-5)


class Changing(Attention):
    """Changes its input between two calls, so that nobody counts it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        query = self.q_proj(hidden_states)
        hidden_states.data.mul_(2)
        return query + self.k_proj(hidden_states).repeat(1, 1, 3) + self.v_proj(hidden_states).repeat(1, 1, 3)


def test_an_input_that_is_changed_between_two_calls_is_multiplied_as_it_is() -> None:
    torch.manual_seed(0)
    original = Changing()
    model = kernels_ext_npu.kernelize(copy.deepcopy(original).npu())
    torch.testing.assert_close(model(X.npu()).cpu(), original(X.clone()), rtol=1e-4, atol=1e-5)


def test_siblings_are_called_once_on_every_way_with_one_input() -> None:
    assert [found.names for found in siblings_in(Siblings())] == [("d", "g")]
    assert [found.names for found in siblings_in(Attention())] == [("q_proj", "k_proj", "v_proj")]
    attention = zoo.build("qwen3").model.layers[0].self_attn
    assert [found.names for found in siblings_in(attention)] == [("q_proj", "k_proj", "v_proj")]


def test_a_head_that_computes_logits_is_a_layer_as_the_others() -> None:
    """With all kernels, of which that of the loss has the head defer logits while there are labels."""
    kernels_ext_npu.register()
    model = kernels_ext_npu.kernelize(zoo.build("qwen3").to("npu")).train()
    inputs = {name: value.npu() for name, value in zoo.inputs("qwen3", model).items()}
    loss = model(**inputs, use_cache=False).logits.square().mean()
    with Cost() as cost:
        loss.backward()
    assert not cost.launches["copy_"]
    assert all(parameter.grad.is_contiguous() for parameter in model.parameters())
