"""Gate and up in one storage, while something else decides where parameters lie: packed rightly, or not at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import kernels_ext_npu
from tests.distributed.parallel import assert_right, largest_difference, mesh, whole
from tests.distributed.stack import batch, build, is_packed, train, trained_on_the_cpu

pytestmark = pytest.mark.distributed


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
    x = batch().detach()
    model = build().to("npu")
    if before:
        kernels_ext_npu.kernelize(model)
    parallel = WAYS[way](model)
    if not before:
        kernels_ext_npu.kernelize(parallel)
    rank = torch.distributed.get_rank()
    # the mean over the batch of each rank, and over ranks: as the CPU's over the whole batch
    train(parallel, x.chunk(2)[rank].to("npu"), lambda step: kernels_ext_npu.kernelize(parallel))
    packed = is_packed(parallel)
    if isinstance(parallel, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(parallel):
            state = {name: whole(p) for name, p in model.state_dict().items()}
    else:
        state = {name: whole(p) for name, p in model.named_parameters()}
    kernels_ext_npu.unregister()
    expected = trained_on_the_cpu(x)
    assert state.keys() == expected.keys(), state.keys()
    return {
        "differences": {name: largest_difference(state[name], expected[name]) for name in expected},
        "packed": packed,
    }


@pytest.mark.parametrize("before", [False, True], ids=["parallel first", "kernels first"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_after_three_steps(two_ranks, way, before) -> None:
    outcomes = two_ranks.run(train_in_parallel, way, before)
    assert_right(outcomes)
    if way != "FSDP1, original parameters":  # which may lie side by side in its buffer
        for outcome in outcomes:
            assert outcome["packed"] == [way.startswith("DDP")] * 2
