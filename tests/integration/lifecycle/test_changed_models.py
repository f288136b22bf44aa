"""What decided on a swap changes later: the kernel is taken out at the next look, and until then the report says so."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import kernels_ext_npu
from tests.support import zoo
from tests.support.agreement import TOLERANCE


def modules(model: nn.Module, name: str) -> list[Any]:
    return [module for module in model.modules() if name in type(module).__name__]


def relu(module: Any) -> None:
    module.act_fn = ACT2FN["relu"]


def gelu(module: Any) -> None:
    module.act_fn = ACT2FN["gelu_pytorch_tanh"]


def other_gate(experts: Any) -> None:
    experts._apply_gate = MethodType(lambda self, both: both[..., ::2].tanh() * both[..., 1::2], experts)


# a change, of modules with this in the names of their classes, a model, and the kind of what it is about
CHANGES: dict[str, tuple[Callable[[Any], object], str, str, str]] = {
    "activation that no kernel has": (relu, "MLP", "qwen3", "gated MLPs"),
    "activation of another kernel": (gelu, "MLP", "qwen3", "gated MLPs"),
    "activation of experts": (relu, "Experts", "qwen3_moe", "experts"),
    "alpha of experts": (lambda m: setattr(m, "alpha", 0.5), "Experts", "gpt_oss", "experts"),
    "limit of experts": (lambda m: setattr(m, "limit", 0.01), "Experts", "gpt_oss", "experts"),
    "gate of experts": (other_gate, "Experts", "gpt_oss", "experts"),
}
LOOKS = {"kernelize": kernels_ext_npu.kernelize, "train": lambda model: model.train()}


def outputs(model: nn.Module, name: str) -> Tensor:
    device = next(model.parameters()).device
    inputs = {key: value.to(device) for key, value in zoo.inputs(name, model).items()}
    with torch.no_grad():
        return model(**inputs).logits.cpu()


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
    before = [row for row in kernels_ext_npu.report(model) if row.kind == kind]
    assert not any(row.swapped for row in before)
    assert all("changed since it was swapped in" in row.reason for row in before)
    expected, at_once = outputs(original.eval(), name), outputs(model, name)
    assert (expected - unchanged).norm() > 100 * TOLERANCE * expected.norm()  # the change shows
    LOOKS[look](model)
    nn.Module.train(model, False)  # no dropout; transformers' own would look again
    for found in (at_once, outputs(model, name)):
        assert (found - expected).norm() <= TOLERANCE * expected.norm()
    rows = [row for row in kernels_ext_npu.report(model) if row.kind == kind]
    assert not [row for row in rows if row.reason and "changed since" in row.reason]


def test_a_kernel_that_is_left_out_now_is_taken_out(registered) -> None:
    model = kernels_ext_npu.kernelize(zoo.build("qwen3").to("npu"))
    kernels_ext_npu.register(kernels=["RMSNorm"])
    kernels_ext_npu.kernelize(model)
    assert {row.kind for row in kernels_ext_npu.report(model) if row.swapped} == {"norms"}


def test_a_part_that_was_restored_stays_so_until_it_is_asked_for(registered) -> None:
    model = zoo.build("qwen3").to("npu")
    model.set_use_kernels(True)
    layer = model.model.layers[0]

    def swapped() -> set[bool]:
        return {row.swapped for row in kernels_ext_npu.report(layer) if row.kind in ("norms", "gated MLPs")}

    kernels_ext_npu.restore(layer)
    for look in (model.train, model.eval):
        look()
        assert swapped() == {False}
    rows = [row for row in kernels_ext_npu.report(model) if row.path.startswith("model.layers.0.mlp")]
    assert [row.reason for row in rows] == [
        "restore() was called for this part of the model: kernelize() swaps kernels into it again"
    ]
    kernels_ext_npu.kernelize(layer)
    assert swapped() == {True}
    kernels_ext_npu.restore(model.model)  # a transformers model in another
    model.train()
    assert swapped() == {False}
    model.use_kernels = False
    model.use_kernels = True  # asks for all of it
    assert swapped() == {True}


def test_what_is_advised_can_be_done_where_the_model_is(registered) -> None:
    model = kernels_ext_npu.kernelize(copy.deepcopy(zoo.build("qwen3")).to("npu"))
    for mlp in modules(model, "MLP"):
        relu(mlp)
    (here,) = {row.reason for row in kernels_ext_npu.report(model) if row.kind == "gated MLPs"}
    model.to("cpu")
    (away,) = {row.reason for row in kernels_ext_npu.report(model) if row.kind == "gated MLPs"}
    assert here.endswith("; kernelize(model) takes the kernel out")
    assert away.endswith("; restore(model) takes the kernels out")
    kernels_ext_npu.restore(model)
    original = copy.deepcopy(zoo.build("qwen3"))
    for mlp in modules(original, "MLP"):
        relu(mlp)
    torch.testing.assert_close(outputs(model, "qwen3"), outputs(original, "qwen3"), rtol=0, atol=0)


# of positions: the operator would take it for the weight of a norm over two dimensions
WEIGHTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "scalar": lambda weight, rows, positions: weight.new_tensor(1.5),
    "one": lambda weight, rows, positions: weight[:1].clone(),
    "of positions": lambda weight, rows, positions: torch.stack([weight * (i + 1) for i in range(positions)]),
    "of rows": lambda weight, rows, positions: torch.stack([weight * (i + 1) for i in range(rows)])[:, None],
}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weight_of_another_shape_is_broadcast_as_without_kernels(registered, weight: str) -> None:
    original = zoo.build("qwen3")
    model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    shape = zoo.inputs("qwen3", original)["input_ids"].shape
    for each in (original, model):
        each.model.norm.weight = nn.Parameter(WEIGHTS[weight](each.model.norm.weight.detach(), *shape))
    found, expected = outputs(model, "qwen3"), outputs(original, "qwen3")
    assert (found - expected).norm() <= TOLERANCE * expected.norm()


def test_a_forward_of_another_file_counts_even_if_it_begins_in_the_same_line(registered, monkeypatch) -> None:
    original = zoo.build("qwen3_moe")
    model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    outputs(model, "qwen3_moe")
    cls = type(modules(original, "Experts")[0].act_fn)
    lines_before = "\n" * (cls.forward.__code__.co_firstlineno - 1)
    exec(compile(f"{lines_before}def forward(self, x): return 0.5 * x", "other.py", "exec"), found := {})
    monkeypatch.setattr(cls, "forward", found["forward"])
    assert "other.py" in cls.forward.__code__.co_filename
    ours, expected = outputs(model, "qwen3_moe"), outputs(original, "qwen3_moe")
    assert (ours - expected).norm() <= TOLERANCE * expected.norm()
