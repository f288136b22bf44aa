"""Adapters beside large layers of bfloat16: nothing large is cast, and results are as near as peft's.

Adapters of float32 multiply large matrices of bfloat16 as they are.
"""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from kernels_ext_npu.measuring.costs import Cost
from tests.linear.test_lora_functions import H, drawn, exact, layer

N, RANKS, SCALE = 24, (4, 2), 2.0
SHAPES = [shape for rank in RANKS for shape in ((rank, H), (N, rank))]


@pytest.fixture
def mixed(kernel, monkeypatch):
    """The products in question, however small the matrices are."""
    module = import_module(f"{kernel.__name__}._common.split_bf16")
    monkeypatch.setattr(module, "LARGE", 0)
    return module


def one(kernel, x: Tensor, weights: list[Tensor], adapters: list) -> Tensor:
    return kernel.lora_linear(x, weights[0], None, adapters[:1])


def together(kernel, x: Tensor, weights: list[Tensor], adapters: list) -> Tensor:
    return torch.cat(kernel.lora_linears(x, [(w, None, adapter) for w, adapter in zip(weights, adapters)]), -1)


def pair(kernel, x: Tensor, weights: list[Tensor], adapters: list) -> Tensor:
    return kernel.lora_pair(x, [(w, None, adapter) for w, adapter in zip(weights, adapters)])


def formula(function, x: Tensor, weights: list[Tensor], factors: list[Tensor]) -> Tensor:
    """What peft computes, whose adapters cast their input, and whose sum is cast."""
    given = [(a, b, SCALE, x.to(a.dtype)) for a, b in zip(factors[::2], factors[1::2])]
    layers = [layer(x, weight, None, each).to(x.dtype) for weight, each in zip(weights, given)]
    return torch.cat(layers[: 1 if function is one else 2], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [one, together, pair])
def test_results_are_no_further_from_float64_than_pefts(kernel, mixed, function, dtype) -> None:
    torch.manual_seed(0)
    (both,) = drawn((2 * N, H), dtype=torch.bfloat16, trained=False)
    weights = [*both.chunk(2)]
    leaves = [*drawn((2, 300, H), dtype=torch.bfloat16), *drawn(*SHAPES, dtype=dtype)]
    truth, theirs = exact(leaves), [leaf.detach().clone().requires_grad_() for leaf in leaves]
    adapters = [kernel.Adapter(a, b, SCALE) for a, b in zip(leaves[1::2], leaves[2::2])]
    with Cost() as cost:
        y = function(kernel, leaves[0], weights, adapters)
        grad = torch.ones_like(y) / 3
        y.backward(grad)
    assert "_to_copy" not in cost.launches
    expected = formula(function, truth[0], [w.cpu().double() for w in weights], truth[1:])
    peft_result = formula(function, theirs[0], weights, theirs[1:])
    expected.backward(grad.cpu().double())
    peft_result.backward(grad)
    results = zip((y, *(leaf.grad for leaf in leaves)), (peft_result, *(leaf.grad for leaf in theirs)))
    for (ours, other), true in zip(results, (expected, *(leaf.grad for leaf in truth))):
        if true is not None:
            far, allowed = ((tensor.detach().cpu().double() - true.detach()).norm() for tensor in (ours, other))
            assert far <= 1.02 * allowed  # no more roundings to bfloat16, of sums that differ in their order


def test_three_pieces_are_the_number_itself(mixed) -> None:
    numbers = torch.randn(5, 7).npu() * torch.logspace(-20, 20, 7).npu()
    for matrix in (numbers, numbers.t(), numbers[:, 1:4]):
        pieces = mixed.split_into_bf16(matrix)
        assert pieces.dtype is torch.bfloat16
        assert torch.equal(sum(piece.double().cpu() for piece in pieces), matrix.double().cpu())


def test_small_matrices_are_cast(kernel) -> None:
    x, weight = drawn((6, H), (N, H), dtype=torch.bfloat16, trained=False)
    adapter = kernel.Adapter(*drawn(*SHAPES[:2]), SCALE)
    with Cost() as cost:
        kernel.lora_linear(x, weight, None, [adapter])
    assert cost.launches.total() == 5  # with one cast and one sum
