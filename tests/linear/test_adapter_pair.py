"""Two layers with adapters whose weights are neighbours, as one product, against float64."""

import pytest
import torch
from torch import Tensor

from kernels_ext_npu.measuring.costs import Cost
from tests.linear.test_adapter_functions import DTYPES, H, assert_near, drawn, exact, layer

N, SCALE = 24, 2.0


def made(dtype: torch.dtype, of_adapters: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Neighbours, and what is trained: an input, and two factors for each; ranks differ."""
    torch.manual_seed(0)
    (both,) = drawn((2 * N, H), dtype=dtype, trained=False)
    return [*both.chunk(2)], [*drawn((2, 5, H), dtype=dtype), *drawn((4, H), (N, 4), (2, H), (N, 2), dtype=of_adapters)]


def layers_of(kernel, weights: list[Tensor], leaves: list[Tensor], **options) -> list[tuple]:
    _, a, b, c, d = leaves
    first, second = weights
    return [(first, None, kernel.Adapter(a, b, SCALE)), (second, None, kernel.Adapter(c, d, SCALE, **options))]


def expected_of(weights: list[Tensor], leaves: list[Tensor]) -> Tensor:
    x, a, b, c, d = leaves
    first, second = (weight.cpu().double() for weight in weights)
    return torch.cat((layer(x, first, None, (a, b, SCALE, None)), layer(x, second, None, (c, d, SCALE, None))), -1)


@pytest.mark.parametrize(("dtype", "of_adapters"), DTYPES)
@pytest.mark.parametrize("trained", [range(5), [0], [1, 4], [2]])
def test_both_are_those_of_float64(kernel, dtype, of_adapters, trained) -> None:
    weights, leaves = made(dtype, of_adapters)
    for place, leaf in enumerate(leaves):
        leaf.requires_grad_(place in trained)
    truth = exact(leaves)
    y, expected = kernel.lora_pair(leaves[0], layers_of(kernel, weights, leaves)), expected_of(weights, truth)
    assert y.dtype == dtype
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad.npu())
    expected.backward(grad.double())
    assert_near(y, expected, dtype)
    for place, (leaf, true) in enumerate(zip(leaves, truth)):
        assert (leaf.grad is not None) == (place in trained)
        if place in trained:
            assert leaf.grad.dtype == leaf.dtype
            assert_near(leaf.grad, true.grad, dtype)


def test_gradients_are_differentiated(kernel) -> None:
    weights, leaves = made(torch.float32, torch.float32)

    def second(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.tanh().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    y, truth = kernel.lora_pair(leaves[0], layers_of(kernel, weights, leaves)), exact(leaves)
    for found, expected in zip(second(y, leaves), second(expected_of(weights, truth), truth)):
        assert (found.cpu().double() - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize(("of_adapters", "launches"), [(torch.bfloat16, (7, 6)), (torch.float32, (9, 9))])
def test_nothing_of_the_size_of_both_is_laid_side_by_side(kernel, of_adapters, launches) -> None:
    weights, leaves = made(torch.bfloat16, of_adapters)
    with Cost() as forward:
        y = kernel.lora_pair(leaves[0], layers_of(kernel, weights, leaves))
    grad = torch.ones_like(y)
    inputs = [leaves[0], leaves[1], leaves[3]]
    with Cost() as backward:
        torch.autograd.grad(y, inputs, grad)
    assert (forward.launches.total(), backward.launches.total()) == launches
    assert forward.bytes["cat"] + backward.bytes["cat"] == 4 * leaves[1].element_size() * 6 * H


def test_a_weight_that_was_changed_in_place_is_an_error(kernel) -> None:
    weights, leaves = made(torch.float32, torch.float32)
    y = kernel.lora_pair(leaves[0], layers_of(kernel, weights, leaves))
    weights[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_no_pair_is_not_computed(kernel) -> None:
    weights, leaves = made(torch.float32, torch.float32)
    (first, _, one), (second, _, other) = layers_of(kernel, weights, leaves)
    x, bias = leaves[0], torch.zeros(N, device="npu")
    apart = second.clone()
    for layers in (
        [(first, None, one), (apart, None, other)],
        [(second, None, one), (first, None, other)],
        [(first, bias, one), (second, bias, other)],
        [(first, None, one), (second, None, other._replace(scale=1.0))],
        [(first, None, one), (second, None, other._replace(p=0.5))],
        [(first, None, one), (second, None, other._replace(x=x))],
    ):
        assert kernel.lora_pair(x, layers) is None
    for weight in (first, second):  # whose gradient it would not give
        weight.requires_grad_(True)
        assert kernel.lora_pair(x, [(first, None, one), (second, None, other)]) is None
        weight.requires_grad_(False)
    whole = [(first, None, one), (second, None, other)]
    with torch.no_grad():
        y = kernel.lora_pair(x, whole)
    assert not y.requires_grad
    assert torch.equal(y, kernel.lora_pair(x, whole))
