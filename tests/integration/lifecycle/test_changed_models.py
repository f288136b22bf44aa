"""What decided on a swap changes later: the kernel is taken out at the next look, and until then the report says so."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import kernels_ext_npu
from tests.support import zoo
from tests.support.nearness import TOLERANCE, assert_near
from tests.support.served import kernelized, reasons, rows, swapped


def modules(model: nn.Module, name: str) -> list[Any]:
    return [module for module in model.modules() if name in type(module).__name__]


def relu(module: Any) -> None:
    module.act_fn = ACT2FN["relu"]


def other_gate(experts: Any) -> None:
    experts._apply_gate = MethodType(lambda self, both: both[..., ::2].tanh() * both[..., 1::2], experts)


# a change, of modules with this in the names of their classes, a model, and the kind of what it is about
CHANGES: dict[str, tuple[Callable[[Any], object], str, str, str]] = {
    "activation that no kernel has": (relu, "MLP", "qwen3", "gated MLPs"),
    "activation of experts": (relu, "Experts", "qwen3_moe", "experts"),
    "alpha of experts": (lambda m: setattr(m, "alpha", 0.5), "Experts", "gpt_oss", "experts"),
    "limit of experts": (lambda m: setattr(m, "limit", 0.01), "Experts", "gpt_oss", "experts"),
    "gate of experts": (other_gate, "Experts", "gpt_oss", "experts"),
}
LOOKS = {"kernelize": kernels_ext_npu.kernelize, "train": lambda model: model.train()}


@torch.no_grad()
def outputs(model: nn.Module, name: str) -> Tensor:
    return zoo.logits(name, model).cpu()


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("case", CHANGES)
def test_a_change_counts_at_once_and_is_seen_at_the_next_look(registered, case: str, look: str) -> None:
    change, class_name, name, kind = CHANGES[case]
    original = zoo.build(name)
    model = copy.deepcopy(original).to("npu")
    model.set_use_kernels(True)
    unchanged = outputs(model, name)
    for each in (original, model):
        for module in modules(each, class_name):
            change(module)
    assert swapped(model, kind) == {False}
    assert all("changed since it was swapped in" in reason for reason in reasons(model, kind))
    expected, at_once = outputs(original.eval(), name), outputs(model, name)
    assert (expected - unchanged).norm() > 100 * TOLERANCE * expected.norm()  # the change shows
    LOOKS[look](model)
    nn.Module.train(model, False)  # no dropout; transformers' own would look again
    for found in (at_once, outputs(model, name)):
        assert_near(found, expected)
    assert not [reason for reason in reasons(model, kind) if reason and "changed since" in reason]


class HalvedInTraining(Qwen3MoeExperts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up * (0.5 if self.training else 1.0)


def test_a_flag_that_a_gate_of_experts_reads_counts_at_once(registered) -> None:
    original = zoo.build("qwen3_moe")
    for module in modules(original, "Experts"):
        module.__class__ = HalvedInTraining
    model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    for training in (False, True):
        for each in (original, model):
            nn.Module.train(each, training)
        assert_near(outputs(model, "qwen3_moe"), outputs(original, "qwen3_moe"))


def test_a_kernel_that_is_left_out_now_is_taken_out(registered) -> None:
    model = kernelized("qwen3")
    kernels_ext_npu.register(kernels=["RMSNorm"])
    kernels_ext_npu.kernelize(model)
    assert {row.kind for row in rows(model) if row.swapped} == {"norms"}


def test_a_part_that_was_restored_stays_so_until_it_is_asked_for(registered) -> None:
    model = zoo.build("qwen3").to("npu")
    model.set_use_kernels(True)
    layer = model.model.layers[0]

    def are_swapped() -> set[bool]:
        return swapped(layer, "norms") | swapped(layer, "gated MLPs")

    kernels_ext_npu.restore(layer)
    for look in (model.train, model.eval):
        look()
        assert are_swapped() == {False}
    assert reasons(layer, "gated MLPs") == {
        "restore() was called for this part of the model: kernelize() swaps kernels into it again"
    }
    kernels_ext_npu.kernelize(layer)
    assert are_swapped() == {True}
    kernels_ext_npu.restore(model.model)  # a transformers model in another
    model.train()
    assert are_swapped() == {False}
    model.use_kernels = False
    model.use_kernels = True  # asks for all of it
    assert are_swapped() == {True}


def test_what_is_advised_can_be_done_where_the_model_is(registered) -> None:
    model, original = kernelized("qwen3"), zoo.build("qwen3")
    for mlp in (*modules(model, "MLP"), *modules(original, "MLP")):
        relu(mlp)
    (here,) = reasons(model, "gated MLPs")
    (away,) = reasons(model.to("cpu"), "gated MLPs")
    assert here.endswith("; kernelize(model) takes the kernel out")
    assert away.endswith("; restore(model) takes the kernels out")
    kernels_ext_npu.restore(model)
    assert torch.equal(outputs(model, "qwen3"), outputs(original, "qwen3"))


def test_what_has_no_tensors_is_where_its_model_is(registered) -> None:
    model = nn.Sequential(nn.Linear(4, 4), ACT2FN["gelu_new"]).to("npu")
    kernels_ext_npu.kernelize(model)
    kernels_ext_npu.register(kernels=["RMSNorm"])
    (here,) = reasons(model, "activations")
    (away,) = reasons(model.to("cpu"), "activations")
    assert here.endswith("leaves Activation out; kernelize(model) takes the kernel out")
    assert away.endswith("leaves Activation out; restore(model) takes the kernels out")


# of positions: the operator would take it for the weight of a norm over two dimensions
WEIGHTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "scalar": lambda weight, rows, positions: weight.new_tensor(1.5),
    "one": lambda weight, rows, positions: weight[:1].clone(),
    "of positions": lambda weight, rows, positions: torch.stack([weight * (i + 1) for i in range(positions)]),
    "of rows": lambda weight, rows, positions: torch.stack([weight * (i + 1) for i in range(rows)])[:, None],
}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weight_of_another_shape_is_broadcast_as_without_kernels(registered, weight: str) -> None:
    original, model = zoo.build("qwen3"), kernelized("qwen3")
    shape = zoo.inputs("qwen3", original)["input_ids"].shape
    for each in (original, model):
        each.model.norm.weight = nn.Parameter(WEIGHTS[weight](each.model.norm.weight.detach(), *shape))
    assert_near(outputs(model, "qwen3"), outputs(original, "qwen3"))


def test_a_new_forward_from_another_file_at_the_same_line_is_noticed(registered, monkeypatch) -> None:
    original, model = zoo.build("qwen3_moe"), kernelized("qwen3_moe")
    outputs(model, "qwen3_moe")
    cls = type(modules(original, "Experts")[0].act_fn)
    lines_before = "\n" * (cls.forward.__code__.co_firstlineno - 1)
    exec(compile(f"{lines_before}def forward(self, x): return 0.5 * x", "other.py", "exec"), found := {})
    monkeypatch.setattr(cls, "forward", found["forward"])
    assert "other.py" in cls.forward.__code__.co_filename
    assert_near(outputs(model, "qwen3_moe"), outputs(original, "qwen3_moe"))
