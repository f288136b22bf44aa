"""Linear layers with adapters, while DDP or FSDP2 decides where gradients and weights lie.

Under DDP with ``gradient_as_bucket_view`` a gradient is a view of a bucket: the kernel's has to get into it.
"""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from tests.distributed.modules import normal
from tests.distributed.parallel import assert_right, largest_difference, mesh, seeded, whole

pytestmark = pytest.mark.distributed
SIZE, STEPS = 16, 3
WAYS = ("DDP", "DDP, gradients in buckets", "FSDP2")


class Layer(nn.Module):
    """Projections of one input, as transformers calls them, and one of what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(SIZE, 8, bias=False), nn.Linear(SIZE, SIZE)

    def forward(self, hidden_states: Tensor) -> Tensor:
        query = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, 8)
        key = self.k_proj(hidden_states).tanh()
        value = self.v_proj(hidden_states)
        return hidden_states + self.o_proj((query * (key + value).unsqueeze(-2)).flatten(-2))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> nn.Module:
    """The same on every rank; adapters alone are trained."""
    model = seeded(Stack, 0.1)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=r".*_proj", init_lora_weights=False)).train()


def train(model: nn.Module, batches: list[Tensor]) -> None:
    """Steps of SGD with momentum. The gradients of both batches are accumulated, and reduced with the last."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2e-3, momentum=0.9)
    for _ in range(STEPS):
        for place, x in enumerate(batches):
            is_last = place == len(batches) - 1
            waits = isinstance(model, DistributedDataParallel) and not is_last
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            with model.no_sync() if waits else contextlib.nullcontext():
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_parallel(way: str, model: nn.Module) -> nn.Module:
    if way != "FSDP2":
        return DistributedDataParallel(model, gradient_as_bucket_view=way != "DDP")
    for layer in model.modules():
        if isinstance(layer, Layer):
            fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def train_in_parallel(way: str) -> dict[str, Any]:
    batches = [normal(4, 5, SIZE).detach(), normal(4, 5, SIZE).detach() + 0.3]
    kernels_ext_npu.register(kernels=["Linear"])
    model = build().to("npu")
    parallel = in_parallel(way, model)
    kernels_ext_npu.kernelize(parallel)
    mine = [x.chunk(2)[torch.distributed.get_rank()].to("npu") for x in batches]
    with Cost() as cost:
        train(parallel, mine)
    parallel(mine[0]).sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    found = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    reasons = Counter(row.reason for row in kernels_ext_npu.report(parallel).projections)
    kernels_ext_npu.unregister()
    original = build()
    train(original, batches)
    expected = {name: p for name, p in original.named_parameters() if p.requires_grad}
    before = dict(build().named_parameters())
    assert found.keys() == expected.keys()
    return {
        "differences": {name: largest_difference(found[name], expected[name]) for name in expected},
        "moved": min(largest_difference(before[name], expected[name]) for name in expected),
        "reasons": reasons,
        "launches": cost.launches,
        "in buckets": all(grad.untyped_storage().nbytes() > grad.nbytes for grad in grads),
    }


@pytest.mark.parametrize("way", WAYS)
def test_accumulated_gradients_train_as_one_process_does(two_ranks, way) -> None:
    outcomes = two_ranks.run(train_in_parallel, way)
    assert_right(outcomes)
    for outcome in outcomes:
        assert outcome["moved"] > 1e-3  # a hundred times the tolerance
        assert outcome["reasons"] == {"one node with q_proj, k_proj, v_proj": 6, None: 2}
        assert outcome["launches"]["matmul_backward"] == 0
        assert outcome["in buckets"] == (way == "DDP, gradients in buckets") or way == "FSDP2"
