"""Gate and up in one storage, while something else decides where parameters lie: packed rightly, or not at all."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import kernels_ext_npu
from kernels_ext_npu import packing
from tests.distributed.modules import SIZE, gelu_mlp, mlp
from tests.distributed.parallel import assert_right, largest_difference, leaves, mesh, seeded, whole
from tests.distributed.modules import normal

X = (4, 5, SIZE)
STEPS = 3


class Stack(nn.Module):
    """Two MLPs with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp().block, gelu_mlp().block])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build() -> Stack:
    return seeded(Stack, 0.1)


def kernelize(model: nn.Module) -> nn.Module:
    return kernels_ext_npu.kernelize(model)


def is_packed(model: nn.Module) -> list[bool]:
    return [kernel.separate(gate, up) is None for kernel, gate, up in packing.pairs(model)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean(0).sum()


def train(model: nn.Module, x: Tensor, meanwhile: Callable[[int], Any] = lambda step: None) -> None:
    """Steps of SGD: an error in a gradient grows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        meanwhile(step)


def trained_on_the_cpu(x: Tensor) -> dict[str, Tensor]:
    model = build()
    train(model, x)
    return dict(model.named_parameters())


# --- one process: parameters as views of a flat buffer, as ZeRO has them --------------------------------------------


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
    x, model = normal(*X).detach(), build().to("npu")
    names = orders(model)
    if when == "before kernelize":
        flatten(model, names[order], gap)
    kernelize(model)
    if when == "after kernelize":
        flatten(model, names[order], gap)

    def meanwhile(step: int) -> None:
        if when.endswith("in training") and step == 0:
            flatten(model, names[order], gap)
            model.train()
        if when == "twice in training" and step == 1:
            kernelize(model)
            flatten(model, names["apart"], gap)

    train(model, x.to("npu"), meanwhile)
    differences = {n: largest_difference(p, whole_of) for (n, p), whole_of in paired(model, trained_on_the_cpu(x))}
    assert max(differences.values()) < 1e-5, differences
    if when != "twice in training":
        assert is_packed(model) == [order == "as they are" and gap == 0] * 2


def paired(model: nn.Module, expected: dict[str, Tensor]) -> list[tuple[tuple[str, Tensor], Tensor]]:
    return [(item, expected[item[0]]) for item in model.named_parameters()]


def test_a_buffer_is_not_left(registered) -> None:
    """Whoever writes to the buffer, as the optimiser of ZeRO does, writes to the parameters."""
    model = build().to("npu")
    flat = flatten(model, orders(model)["apart"])
    kernelize(model)
    flat.zero_()
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("order", ["as they are", "apart"])
def test_parameters_that_move_between_forward_and_backward(registered, order) -> None:
    """torch takes what they are then: saved parameters are the parameters themselves."""
    x, model, original = normal(*X), build().to("npu"), build()
    kernelize(model)
    loss = loss_of(model, *leaves((x,), "npu"))
    flatten(model, orders(model)[order])
    loss.backward()
    loss_of(original, x).backward()
    differences = {n: largest_difference(p.grad, original.get_parameter(n).grad) for n, p in model.named_parameters()}
    assert max(differences.values()) < 1e-5, differences


# --- two processes --------------------------------------------------------------------------------------------------


def by_fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def by_fsdp1(model: nn.Module, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.npu.current_device(), use_orig_params=use_orig_params)


def by_ddp(model: nn.Module, views: bool) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=views)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "FSDP2": by_fsdp2,
    "FSDP1": lambda model: by_fsdp1(model, False),
    "FSDP1, original parameters": lambda model: by_fsdp1(model, True),
    "DDP": lambda model: by_ddp(model, False),
    "DDP, gradients in buckets": lambda model: by_ddp(model, True),
}


def train_in_parallel(way: str, before: bool) -> dict[str, Any]:
    kernels_ext_npu.register()
    x = normal(*X).detach()
    model = build().to("npu")
    if before:
        kernelize(model)
    parallel = WAYS[way](model)
    if not before:
        kernelize(parallel)
    rank = torch.distributed.get_rank()
    # the mean over the batch of each rank, and over ranks: as the CPU's over the whole batch
    train(parallel, x.chunk(2)[rank].to("npu"), lambda step: kernelize(parallel))
    packed = is_packed(parallel)
    if isinstance(parallel, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(parallel):
            state = {name: whole(p) for name, p in model.state_dict().items()}
    else:
        state = {name: whole(p) for name, p in model.named_parameters()}
    kernels_ext_npu.unregister()
    expected = trained_on_the_cpu(x)
    assert state.keys() == expected.keys(), state.keys()
    return {"differences": {name: largest_difference(state[name], expected[name]) for name in expected}, "packed": packed}


@pytest.mark.parametrize("before", [False, True], ids=["parallel first", "kernels first"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_after_three_steps(two_ranks, way, before) -> None:
    outcomes = two_ranks.run(train_in_parallel, way, before)
    assert_right(outcomes)
    for outcome in outcomes:
        assert outcome["packed"] == [way.startswith("DDP")] * 2
