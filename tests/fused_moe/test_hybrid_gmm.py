"""HybridGmmFunction: values and gradients with weights that are parameters of their own, in any number."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support import npu_counts

pytestmark = pytest.mark.usefixtures("poisoned_memory")

COUNTS = {
    "even": lambda experts: [3] * experts,
    "some empty": lambda experts: [5 * (e % 3 == 0) for e in range(experts)],
    "first only": lambda experts: [7] + [0] * (experts - 1),
    "last only": lambda experts: [0] * (experts - 1) + [7],
    "one row": lambda experts: [int(e == experts // 2) for e in range(experts)],
}


def integers(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: half precision computes with them without rounding."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def truth(x: Tensor, counts: list[int], weights: list[Tensor], biases: list[Tensor], tail: int) -> Tensor:
    rows = x[: sum(counts)].split(counts)
    parts = [part @ weight.t() + bias for part, weight, bias in zip(rows, weights, biases)]
    return torch.cat([*parts, x.new_zeros(tail, weights[0].shape[0])])


def on_device(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.npu().to(dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("experts", [1, 4, *(pytest.param(n, marks=pytest.mark.long) for n in (128, 260)), 130])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_whole_numbers_give_the_very_same_values_and_gradients(kernel: ModuleType, dtype, experts, counts):
    """All sums stay below 256, where bfloat16 has every whole number; rows behind the last group are zero."""
    sizes, inner, outer, rest = COUNTS[counts](experts), 4, 6, 3
    x = integers(sum(sizes) + rest, inner, seed=0)
    weights = [integers(outer, inner, seed=e + 1) for e in range(experts)]
    biases = [integers(outer, seed=-e - 1) for e in range(experts)]
    grad = integers(len(x), outer, seed=9)
    own = [t.clone().requires_grad_() for t in (x, *weights, *biases)]
    expected = truth(own[0], sizes, own[1 : experts + 1], own[experts + 1 :], rest)
    expected.backward(grad)

    leaf = x.npu().to(dtype).requires_grad_()
    parameters = on_device(weights, dtype) + on_device(biases, dtype)
    number, tail = torch.tensor(sizes, device="npu"), torch.arange(len(x), device="npu") >= sum(sizes)
    npu_counts.reset()
    y = kernel.HybridGmmFunction.apply(leaf, number, tail.unsqueeze(-1), True, *parameters)
    y.backward(grad.npu().to(dtype))
    assert npu_counts.read()["stream_syncs"] == 0
    assert torch.equal(y.cpu().float(), expected)
    assert torch.equal(leaf.grad.cpu().float(), own[0].grad)
    for parameter, b in zip(parameters, own[1:]):
        # torch has no gradient for what no row went through, or zeros
        assert torch.equal(parameter.grad.cpu().float(), torch.zeros_like(b) if b.grad is None else b.grad)


@pytest.mark.parametrize(("experts", "forward", "backward"), [(2, 1, 2), (128, 1, 2), (130, 2, 3), (257, 3, 4)])
def test_products_are_as_many_as_lists_and_one_for_all_weights_which_are_not_copied(
    kernel: ModuleType, npu_counters, experts, forward, backward
) -> None:
    leaf = torch.ones(experts, 4, device="npu", dtype=torch.bfloat16, requires_grad=True)
    parameters = on_device([torch.ones(6, 4)] * experts, torch.bfloat16)
    counts = torch.ones(experts, dtype=torch.int64, device="npu")
    npu_counts.reset()
    y = kernel.HybridGmmFunction.apply(leaf, counts, None, False, *parameters)
    assert npu_counters()["npu_grouped_matmul"] == forward
    assert not npu_counters().keys() & {"stack", "cat", "copy_", "_foreach_copy_", "contiguous", "clone"}
    y.backward(torch.ones_like(y))
    assert npu_counters()["npu_grouped_matmul"] == forward + backward
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in parameters}) == 1
    assert all(parameter.grad.is_contiguous() for parameter in parameters)


def test_frozen_weights_get_no_gradient_and_cost_none(kernel: ModuleType, npu_counters) -> None:
    leaf = torch.ones(4, 4, device="npu", dtype=torch.bfloat16, requires_grad=True)
    parameters = on_device([torch.ones(6, 4)] * 4, torch.bfloat16)
    counts = torch.ones(4, dtype=torch.int64, device="npu")
    parameters[1].requires_grad_(False)
    kernel.HybridGmmFunction.apply(leaf, counts, None, False, *parameters).sum().backward()
    assert [parameter.grad is None for parameter in parameters] == [False, True, False, False]
    for parameter in parameters:
        parameter.requires_grad_(False)
    y = kernel.HybridGmmFunction.apply(leaf, counts, None, False, *parameters)
    npu_counts.reset()
    y.backward(torch.ones_like(y))
    assert npu_counters()["npu_grouped_matmul"] == 1
