"""Gate and up in one storage while parameters become views of a flat buffer, as ZeRO has them: right in any order."""

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
from tests.distributed.parallel import largest_difference, leaves
from tests.distributed.stack import batch, build, is_packed, loss_of, train, trained_on_the_cpu


def flatten(model: nn.Module, order: list[str], gap: int = 0) -> Tensor:
    """Let the parameters lie in one buffer, in an order, with a gap after each."""
    parameters = dict(model.named_parameters())
    flat = torch.zeros(sum(p.numel() + gap for p in parameters.values()), device="npu")
    start = 0
    for name in order:
        parameter = parameters[name]
        view = flat[start : start + parameter.numel()].view_as(parameter)
        parameter.data = view.copy_(parameter.detach())
        start += parameter.numel() + gap
    return flat


def orders(model: nn.Module) -> dict[str, list[str]]:
    names = [name for name, _ in model.named_parameters()]
    return {"as they are": names, "reversed": names[::-1], "apart": sorted(names, key=lambda n: n.split(".")[::-1])}


@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("order", ["as they are", "reversed", "apart"])
@pytest.mark.parametrize("when", ["before kernelize", "after kernelize", "in training", "twice in training"])
def test_parameters_in_a_flat_buffer(registered, when, order, gap) -> None:
    x, model = batch().detach(), build().to("npu")
    names = orders(model)
    if when == "before kernelize":
        flatten(model, names[order], gap)
    kernels_ext_npu.kernelize(model)
    if when == "after kernelize":
        flatten(model, names[order], gap)

    def meanwhile(step: int) -> None:
        if when.endswith("in training") and step == 0:
            flatten(model, names[order], gap)
            model.train()
        if when == "twice in training" and step == 1:
            kernels_ext_npu.kernelize(model)
            flatten(model, names["apart"], gap)

    train(model, x.to("npu"), meanwhile)
    expected = trained_on_the_cpu(x)
    differences = {name: largest_difference(p, expected[name]) for name, p in model.named_parameters()}
    assert all(difference < 1e-5 for difference in differences.values()), differences
    if when != "twice in training":
        assert is_packed(model) == [order == "as they are" and gap == 0] * 2


@pytest.mark.parametrize("order", ["as they are", "apart"])
def test_parameters_that_move_between_forward_and_backward(registered, order) -> None:
    """torch takes what they are then: saved parameters are the parameters themselves."""
    x, model, original = batch(), build().to("npu"), build()
    kernels_ext_npu.kernelize(model)
    loss = loss_of(model, *leaves((x,), "npu"))
    flatten(model, orders(model)[order])
    loss.backward()
    loss_of(original, x).backward()
    differences = {n: largest_difference(p.grad, original.get_parameter(n).grad) for n, p in model.named_parameters()}
    assert all(difference < 1e-5 for difference in differences.values()), differences
