"""A router that is trained, cast or changed after kernels were swapped in computes what its class computes."""

import peft
import pytest
import torch
from torch import nn

import kernels_ext_npu
from tests.integration.recognition.blocks import launched, said
from tests.integration.recognition.router_blocks import OPERATORS, given, made, spread
from tests.integration.recognition.spellings.other_peoples_routers import (
    EXPERTS,
    ROUTERS,
    WIDTH,
    BestGroups,
    Dispatcher,
    GroupPicker,
    Inferring,
    LaterSoftmax,
    LightGate,
    NarrowGate,
    SigmoidGate,
    Undivided,
)
from tests.support.served import rows


@pytest.mark.parametrize("cls", [cls for cls, rule in ROUTERS.items() if rule.trains], ids=lambda cls: cls.__name__)
def test_in_training_it_is_served_if_it_computes_the_same_then(registered, cls: type[nn.Module]) -> None:
    model, plain, rule = made(cls)
    x = given(plain)
    model.train()
    assert said(model) == [(rule.layer, True)]
    torch.testing.assert_close(spread(rule, model.part(x.npu())).double(), rule.weights(plain, x), rtol=1e-5, atol=1e-6)


def test_in_training_a_loss_is_that_of_its_class(registered) -> None:
    model, plain, _ = made(LightGate)
    x = given(plain)
    assert model.part(x.npu())[2] == 0
    found, expected = model.train().part(x.npu())[2], plain.train()(x)[2]
    assert found.requires_grad
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    (row,) = (row for row in rows(model) if row.path == "part")
    assert not row.swapped
    assert "it is trained, and computes something else then" in row.reason
    assert said(model.eval()) == [("SoftmaxTopKRouter", True)]


def test_what_refuses_to_be_trained_refuses_it_still(registered) -> None:
    model, plain, _ = made(GroupPicker)
    with pytest.raises(AssertionError):
        model.train().part(given(plain).npu())


def test_where_its_class_has_no_gradient_it_has_none(registered) -> None:
    model, plain, _ = made(Inferring)
    x = given(plain).npu()
    assert launched(lambda: model.part(x), OPERATORS) == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.part(x)[0].sum().backward()
    with torch.no_grad():
        assert launched(lambda: model.part(x), OPERATORS) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("cls", "name", "value"), [(Dispatcher, "choices", 2), (SigmoidGate, "k", 3), (LightGate, "renorm", False)]
)
def test_another_setting_is_looked_at_again(registered, cls: type[nn.Module], name: str, value: int) -> None:
    model, plain, _ = made(cls)
    x = given(plain).npu()
    setattr(model.part, name, value)
    results: list[tuple] = []
    assert launched(lambda: results.append(model.part(x)), OPERATORS) == 0
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: results.append(model.part(x)), OPERATORS) == 1
    theirs, ours = (spread(ROUTERS[cls], result) for result in results)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_what_a_configuration_says_later_is_seen(registered) -> None:
    model, plain, _ = made(GroupPicker)
    model.part.conf.kept = 3
    x = given(plain).npu()
    assert launched(lambda: model.part(x), OPERATORS) == 0
    for mine, theirs in zip(model.part(x), GroupPicker.forward(model.part, x)):
        assert torch.equal(mine, theirs)


@torch.no_grad()
def test_in_a_dtype_whose_roundings_no_operator_has_its_class_computes(registered) -> None:
    model, plain, rule = made(NarrowGate)
    assert said(model) == [(rule.layer, True)]
    model, x = model.bfloat16(), given(plain).npu().bfloat16()
    assert launched(lambda: model.part(x), OPERATORS) == 0
    (row,) = (row for row in rows(model) if row.path == "part")
    assert not row.swapped
    assert "with a weight in torch.bfloat16 it is not known to round as the operator does" in row.reason


@torch.no_grad()
def test_biases_that_are_learned_later_are_read(registered) -> None:
    model, plain, rule = made(Undivided)
    x = given(plain)
    for part in (model.part, plain):
        part.correction += torch.arange(EXPERTS, device=part.correction.device) / 10
    torch.testing.assert_close(spread(rule, model.part(x.npu())).double(), rule.weights(plain, x), rtol=1e-5, atol=1e-6)


def test_a_linear_layer_is_called_with_what_its_class_calls_it_with(registered) -> None:
    model, plain, _ = made(LaterSoftmax)
    seen = []
    model.part.scorer.register_forward_hook(lambda module, args, result: seen.append((args[0].shape, args[0].dtype)))
    model.part(given(plain).npu())
    assert seen == [((10, WIDTH), torch.float32)]


def test_an_adapter_or_another_layer_in_the_place_of_a_linear_layer_is_called(registered) -> None:
    class Wide(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float() / 2

    model, plain, _ = made(LaterSoftmax)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["scorer"], r=4, init_lora_weights=False))
    x = given(plain).npu()
    for mine, theirs in zip(model.part(x), LaterSoftmax.forward(model.part, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert type(adapted.base_model.model.part.scorer) is not nn.Linear
    model.part.scorer = Wide(WIDTH, EXPERTS).to("npu")
    model, x = model.bfloat16(), x.bfloat16()
    for mine, theirs in zip(model.part(x), LaterSoftmax.forward(model.part, x), strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_under_autocast_its_class_computes(registered) -> None:
    model, plain, _ = made(BestGroups)
    x = given(plain).npu()
    with torch.no_grad(), torch.autocast("npu", torch.bfloat16):
        assert launched(lambda: model.part(x), OPERATORS) == 0


@torch.no_grad()
def test_it_is_taken_out(registered) -> None:
    model, plain, _ = made(Dispatcher)
    x = given(plain).npu()
    assert launched(lambda: model.part(x), OPERATORS) == 1
    kernels_ext_npu.restore(model)
    assert launched(lambda: model.part(x), OPERATORS) == 0
    assert "forward" not in vars(model.part)
