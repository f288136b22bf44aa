"""Forwards that other libraries have wrapped: the kernel goes inside, the wrapper stays, and both can be undone."""

import copy
import functools
import re
from types import MethodType

import kernels
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import kernels_ext_npu
from kernels_ext_npu.binding import forward_binding
from tests.support import npu_counts, zoo
from tests.support.nearness import TOLERANCE, assert_near
from tests.support.served import kernelized

SIZE = 32


class Norms(nn.Module):
    """Two norms of their own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Qwen3RMSNorm(SIZE), Qwen3RMSNorm(SIZE)
        with torch.no_grad():
            self.first.weight.uniform_(0.5, 1.5)
            self.second.weight.uniform_(0.5, 1.5)

    def forward(self, x):
        return self.second(self.first(x))


def norms() -> Norms:
    torch.manual_seed(0)
    return Norms().to("npu")


class Recorder:
    """An object that is called in place of a forward."""

    def __init__(self, module: nn.Module, seen: list) -> None:
        self.inner, self.seen = module.forward, seen

    def __call__(self, *args, **kwargs):
        self.seen.append("object")
        return self.inner(*args, **kwargs)


def by_closure(module, seen):
    original = module.forward

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        seen.append("closure")
        return original(*args, **kwargs)

    return wrapped


def by_default(module, seen):
    def wrapped(x, *, original=module.forward):
        seen.append("default")
        return original(x)

    return wrapped


def by_partial(module, seen):
    def call(note, original, x):
        seen.append(note)
        return original(x)

    return functools.partial(call, "partial", module.forward)


def by_attribute(module, seen):
    """As accelerate does, by a name of somebody else."""
    module.forward_before = module.forward

    def wrapped(self, x):
        seen.append("attribute")
        return self.forward_before(x)

    return MethodType(wrapped, module)


def by_table(module, seen):
    forwards = {id(module): type(module).forward}

    def wrapped(x):
        seen.append("table")
        return forwards[id(module)](module, x)

    return wrapped


def by_compiler(module, seen):
    """torch.compile of a forward; compiled again for what has taken its place."""
    return torch.compile(module.forward, backend="eager")


def by_object_in_a_closure(module, seen):
    """As the expert parallelism of transformers 5.23 does, whose objects hold others."""
    outer = Recorder(module, seen)
    outer.inner = Recorder(module, seen)

    def wrapped(x):
        return outer(x)

    return wrapped


SHOWN = [by_closure, by_default, by_attribute, by_compiler, by_object_in_a_closure]
HIDDEN = [by_partial, by_table]


def wrap(module: nn.Module, *ways) -> list:
    seen: list = []
    for way in ways:
        module.forward = way(module, seen)
    return seen


def launches(model: nn.Module, x: torch.Tensor) -> int:
    npu_counts.reset()
    model(x)
    return npu_counts.read().get("npu_rms_norm", 0)


def rows(model: nn.Module) -> dict[str, tuple[bool, str | None]]:
    return {row.path: (row.swapped, row.reason) for row in kernels_ext_npu.report(model)}


@pytest.mark.parametrize("way", SHOWN + HIDDEN, ids=lambda way: way.__name__)
def test_a_kernel_replaces_the_forward_inside_a_wrapper_that_exposes_it_and_restore_puts_it_back(
    registered, way
) -> None:
    """A wrapper that hides its forward stays, with a reason in the report, and its module has no kernel."""
    model, shows = norms(), way in SHOWN
    x = torch.randn(3, SIZE, device="npu")
    expected = model(x)
    seen = wrap(model.first, way)
    wrapper = model.first.forward
    kernels_ext_npu.kernelize(model)
    assert model.first.forward == wrapper
    found = rows(model)
    assert found["second"] == (True, None)
    assert found["first"][0] == shows
    if not shows:
        assert re.match(r"another library has wrapped its forward \(.*the wrapper must stay", found["first"][1])
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="npu", use_fallback=True)  # alone it would drop it
        assert model.first.forward == wrapper
    assert launches(model, x) == 1 + shows
    torch.testing.assert_close(model(x), expected)  # float32: another order of summation
    kernels_ext_npu.restore(model)
    assert model.first.forward == wrapper
    assert launches(model, x) == 0
    assert torch.equal(model(x), expected)
    assert len(seen) == {by_compiler: 0, by_object_in_a_closure: 8}.get(way, 4)
    assert not shows or forward_binding.own_forward(model.first) is Qwen3RMSNorm.forward


@pytest.mark.parametrize("way", HIDDEN, ids=lambda way: way.__name__)
def test_a_wrapper_around_a_kernel_calls_a_forward_that_the_class_gets_later(registered, monkeypatch, way) -> None:
    """The wrapper hides what it holds: a forward that knows when it is not the one to compute any more."""
    model = kernels_ext_npu.kernelize(norms())
    x = torch.randn(3, SIZE, device="npu")
    expected = model(x)
    wrap(model.first, way)
    kernels_ext_npu.restore(model)
    torch.testing.assert_close(model(x), expected)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda self, hidden_states: hidden_states * 2)
    assert torch.equal(model.second(x), x * 2)
    assert launches(model.first, x) == 0


def test_another_experts_implementation_gets_through_a_wrapper(registered) -> None:
    model = kernelized("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    seen = wrap(experts, by_closure)
    kernels_ext_npu.kernelize(model)
    for name, products in (("eager", 0), ("npu_grouped_mm", 4)):
        model.set_experts_implementation(name)
        npu_counts.reset()
        zoo.logits("qwen3_moe", model)
        assert npu_counts.read().get("npu_grouped_matmul", 0) == products
    assert seen == ["closure"] * 2


def test_hooks_of_accelerate_stay_and_can_be_removed(registered) -> None:
    model = norms()
    add_hook_to_module(model.first, AlignDevicesHook("npu:0"))
    kernels_ext_npu.kernelize(model)
    assert launches(model, torch.randn(3, SIZE)) == 2  # from the CPU: the hook moves it
    remove_hook_from_module(model.first)
    assert rows(model)["first"] == (True, None)
    kernels_ext_npu.restore(model)
    assert launches(model, torch.randn(3, SIZE, device="npu")) == 0


class MarkedForOthers(nn.Linear):
    """Marked by somebody, for a layer that has no kernel on the NPU."""

    kernel_layer_name = "SiluAndMul"


def test_a_forward_that_is_kept_and_not_called_gets_no_kernel(registered) -> None:
    """A forward that was replaced altogether, with the old one kept for undoing it."""
    model = norms()
    model.first.forward_before = original = model.first.forward

    @functools.wraps(original)
    def replacement(x):
        return 2 * x

    model.first.forward = replacement
    kernels_ext_npu.kernelize(model)
    assert not rows(model)["first"][0]
    assert model.first.forward_before is original
    assert replacement.__wrapped__ is original


def test_two_forwards_of_one_module_are_refused(registered) -> None:
    """A wrapper that compares the kernel with the original: exchanging either would spoil it."""
    model = kernels_ext_npu.kernelize(norms())
    fast, slow = model.first.forward, MethodType(Qwen3RMSNorm.forward, model.first)

    def compared(x):
        torch.testing.assert_close(fast(x), slow(x))
        return slow(x)

    model.first.forward = compared
    kernels_ext_npu.kernelize(model)
    swapped, reason = rows(model)["first"]
    assert not swapped
    assert reason is not None
    assert reason.endswith("it holds both the module's own forward and a kernel")
    assert launches(model, torch.randn(3, SIZE, device="npu")) == 2
    kernels_ext_npu.restore(model)
    assert launches(model, torch.randn(3, SIZE, device="npu")) == 0
    assert model.first.forward is compared


def test_the_forward_of_another_module_is_left_alone(registered) -> None:
    """A module that calls another one in its place."""
    model = norms()
    model.second.forward = by_closure(model.first, [])
    wrapper = model.second.forward
    x = torch.randn(3, SIZE, device="npu")
    expected = model(x)
    kernels_ext_npu.kernelize(model)
    assert rows(model)["first"] == (True, None)
    assert not rows(model)["second"][0]
    assert model.second.forward is wrapper
    torch.testing.assert_close(model(x), expected)


def test_copies_do_not_reach_into_the_original(registered) -> None:
    """Python copies a closure by reference: that of a copy calls the original, with or without kernels."""
    model = norms()
    wrap(model.first, by_closure)
    wrap(model.second, by_attribute)
    kernels_ext_npu.kernelize(model)
    twin = copy.deepcopy(model)
    assert rows(twin)["second"] == (True, None)
    assert not rows(twin)["first"][0]
    x = torch.randn(3, SIZE, device="npu")
    kernels_ext_npu.restore(twin)
    assert launches(model, x) == 2
    assert launches(twin, x) == 1
    kernels_ext_npu.kernelize(twin)
    kernels_ext_npu.restore(model)
    assert launches(model, x) == 0


def test_wrappers_of_classes_marked_for_other_devices_stay(registered) -> None:
    """Also where somebody lets `kernels` look at the model again, while kernels are registered."""
    model = nn.ModuleDict({"norms": norms(), "other": MarkedForOthers(SIZE, 2).to("npu")})
    seen = wrap(model["other"], by_closure)
    wrapper = model["other"].forward
    kernels_ext_npu.kernelize(model)
    assert model["other"].forward is wrapper
    kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="npu")
    model["other"](torch.ones(2, SIZE, device="npu"))
    assert seen == ["closure"]


def test_a_model_that_keeps_its_kernels_keeps_its_wrappers_when_its_mode_changes(registered) -> None:
    model = zoo.build("qwen3").to("npu")
    seen = wrap(model.model.norm, by_closure)
    kernels_ext_npu.kernelize(model)
    kernels_ext_npu.unregister()
    wrapper = model.model.norm.forward
    npu_counts.reset()
    model.train().eval().model.norm(torch.ones(2, model.config.hidden_size, device="npu"))
    assert (model.model.norm.forward, seen) == (wrapper, ["closure"])
    assert npu_counts.read()["npu_rms_norm"] == 1


@pytest.mark.parametrize(
    ("model_type", "name", "adapts"),
    [
        ("qwen3", "Qwen3RMSNorm", False),
        ("qwen3", "Linear", False),  # the head, which defers its logits
        pytest.param("qwen3", "Qwen3Model", False, marks=pytest.mark.long),
        pytest.param("qwen3", "Qwen3DecoderLayer", False, marks=pytest.mark.long),
        ("qwen3", "Qwen3Attention", True),  # layers of one input
        pytest.param("qwen3", "Linear", True, marks=pytest.mark.long),  # of peft
        ("qwen3_next", "Qwen3NextGatedDeltaNet", False),  # whose kernel takes heads that are not repeated
    ],
)
def test_a_wrapper_over_ours_holds_the_forward_that_the_class_had(
    registered, monkeypatch, model_type: str, name: str, adapts: bool
) -> None:
    """As it would without kernels: what the class is given later is not below it."""
    found = []
    for swaps in (False, True):
        model = zoo.build(model_type).to("npu")
        if adapts:
            config = LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
            torch.manual_seed(0)
            model = get_peft_model(model, config).base_model.model
        if swaps:
            kernels_ext_npu.kernelize(model)
        classes = {lora.Linear} if adapts and name == "Linear" else {m.__class__ for m in model.modules()}
        held = [m for m in model.modules() if type(m).__name__ == name and type(m) in classes]
        seen = [wrap(module, by_closure) for module in held]
        with monkeypatch.context() as patched:
            cls = type(held[0])
            patched.setattr(cls, "forward", lambda self, *args, **kwargs: pytest.fail("the forward of later"))
            ids = zoo.inputs(model_type, model)["input_ids"]
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            with torch.no_grad():
                logits = model(input_ids=ids).logits
                compiled = torch.compile(model, backend="eager")(input_ids=ids).logits if name == "Linear" else logits
        assert all(seen)
        found.append((loss.detach(), logits, compiled))
    for ours, plain in zip(found[1], found[0]):
        assert_near(ours, plain, TOLERANCE)
