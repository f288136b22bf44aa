"""What kernels lay side by side or compute by a node of their own, while something else decides where weights lie.

Gate and up are packed rightly, or not at all; gradients of adapters get into the buckets of DDP, of which they are
views with ``gradient_as_bucket_view``. After some steps the weights are those of one process on the CPU.
"""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.swaps import gate_up_layout
from tests.distributed import engines, modules
from tests.distributed.modules import normal
from tests.distributed.parallel import assert_right, largest_difference, mesh, seeded
from tests.integration.swaps.linear.test_adapted_layers import Attention

pytestmark = pytest.mark.distributed
SIZE, STEPS = 16, 3


class Stack(nn.Module):
    """Two gated MLPs with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([modules.mlp().block, modules.gelu_mlp().block])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Layer(nn.Module):
    """Projections of one input, and one of what comes of them, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.attention(hidden_states)


def by_fsdp2(model: nn.Module) -> nn.Module:
    for layer in [m for m in model.modules() if isinstance(m, Layer | Qwen3MLP | Gemma3MLP)]:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def by_fsdp1(model: nn.Module, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.npu.current_device(), use_orig_params=use_orig_params)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "FSDP2": by_fsdp2,
    "FSDP1": partial(by_fsdp1, use_orig_params=False),
    "FSDP1, original parameters": partial(by_fsdp1, use_orig_params=True),
    "DDP": DistributedDataParallel,
    "DDP, gradients in buckets": partial(DistributedDataParallel, gradient_as_bucket_view=True),
}


def mine(x: Tensor) -> Tensor:
    return x.chunk(2)[dist.get_rank()].to("npu")


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: largest_difference(found[name], expected[name]) for name in expected}


def mean_loss(y: Tensor) -> Tensor:
    """Mean over the batch: the mean over ranks of the means over their parts is that of the whole."""
    return y.square().mean(0).sum()


def train(
    model: nn.Module,
    batches: list[Tensor],
    rate: float,
    loss_of: Callable[[Tensor], Tensor],
    behind: Callable[[], object] = lambda: None,
) -> None:
    """Steps of SGD with momentum, by which an error in a gradient grows, with something behind each.

    The gradients of all batches are accumulated, and reduced with the last.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=0.9)
    for _ in range(STEPS):
        for place, x in enumerate(batches):
            with engines.accumulating(model, is_last=place == len(batches) - 1):
                loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        behind()


def train_packed(way: str, before: bool) -> dict[str, Any]:
    """Train gated MLPs, kernelized anew after each step."""
    x, original = normal(4, 5, modules.SIZE).detach(), seeded(Stack, 0.1)
    model = copy.deepcopy(original).to("npu")
    with engines.registered(True):
        if before:
            kernels_ext_npu.kernelize(model)
        parallel = WAYS[way](model)
        if not before:
            kernels_ext_npu.kernelize(parallel)
        train(parallel, [mine(x)], 0.01, mean_loss, lambda: kernels_ext_npu.kernelize(parallel))
        pairs = filter(gate_up_layout.called, parallel.modules())
        packed = [gate_up_layout.why_not_packed(module) is None for module in pairs]
        weights = engines.weights(parallel)
    train(original, [x], 0.01, mean_loss)
    return {"differences": differences(weights, dict(original.named_parameters())), "packed": packed}


@pytest.mark.parametrize("before", [False, True], ids=["parallel first", "kernels first"])
@pytest.mark.parametrize("way", WAYS)
def test_gate_and_up_train_as_in_one_process(two_ranks, way, before) -> None:
    outcomes = two_ranks.run(train_packed, way, before)
    assert_right(outcomes)
    if way != "FSDP1, original parameters":  # which may lie side by side in its buffer
        for outcome in outcomes:
            assert outcome["packed"] == [way.startswith("DDP")] * 2


def with_adapters() -> nn.Module:
    """The same on every rank; adapters alone are trained."""
    model = seeded(lambda: nn.Sequential(Layer(), Layer()), 0.1)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=r".*_proj", init_lora_weights=False)).train()


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def train_adapters(way: str) -> dict[str, Any]:
    batches = [normal(4, 5, SIZE).detach(), normal(4, 5, SIZE).detach() + 0.3]
    kernels_ext_npu.register(kernels=["Linear"])
    model = with_adapters().to("npu")
    parallel = kernels_ext_npu.kernelize(WAYS[way](model))
    with Cost() as cost:
        train(parallel, list(map(mine, batches)), 2e-3, lambda y: y.square().mean())
    parallel(mine(batches[0])).sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    reasons = Counter(row.reason for row in kernels_ext_npu.report(parallel).projections)
    kernels_ext_npu.unregister()
    original = with_adapters()
    before = trained(original)
    train(original, batches, 2e-3, lambda y: y.square().mean())
    return {
        "differences": differences(trained(model), trained(original)),
        "moved": min(differences(before, trained(original)).values()),
        "reasons": reasons,
        "launches": cost.launches,
        "in buckets": all(grad.untyped_storage().nbytes() > grad.nbytes for grad in grads),
    }


@pytest.mark.parametrize("way", ["DDP", "DDP, gradients in buckets", "FSDP2"])
def test_accumulated_gradients_of_adapters_train_as_one_process_does(two_ranks, way) -> None:
    outcomes = two_ranks.run(train_adapters, way)
    assert_right(outcomes)
    for outcome in outcomes:
        assert outcome["moved"] > 1e-3  # a hundred times the tolerance
        assert outcome["reasons"] == {"one node with q_proj, k_proj, v_proj": 6, None: 2}
        assert outcome["launches"]["matmul_backward"] == 0
        assert outcome["in buckets"] == (way == "DDP, gradients in buckets") or way == "FSDP2"
