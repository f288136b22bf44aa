"""Every activation of transformers that a kernel computes: the values and gradients of its own forward."""

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import AccurateGELUActivation, FastGELUActivation, NewGELUActivation, QuickGELUActivation
from transformers.models.bloom.modeling_bloom import BloomGelu, bloom_gelu_forward

from kernels_ext_npu.catalogue import ACTIVATIONS
from kernels_ext_npu.matching.lookup import find_pattern
from tests.support.counted import counted
from tests.support.rounding import launched
from tests.support.swapped import assert_no_further, results, swapped
from tests.support.transformers_files import classes

pytestmark = pytest.mark.usefixtures("registered")
SERVED = (AccurateGELUActivation, BloomGelu, FastGELUActivation, NewGELUActivation, QuickGELUActivation)
each_class = pytest.mark.parametrize("cls", SERVED, ids=lambda cls: cls.__name__)


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-6, 6, 4096).view(16, 256).to(dtype)


@counted
def test_the_classes_are_these() -> None:
    assert {cls for cls in classes(ACTIVATIONS) if find_pattern(cls)} == set(SERVED)


@each_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_and_gradients_are_the_originals(cls, dtype) -> None:
    """To 2e-6: around -5 the formula with 1 + tanh(x) loses what float32 has below 1, which all of them do.

    Short floats are no further from float64.
    """
    original, x = cls(), inputs(dtype)
    sides = results(swapped(original)[0], x.npu()), results(original, x), results(original, x.double())
    for found, expected, truth in zip(*sides, strict=True):
        if dtype is torch.float32:
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=2e-6)
        else:
            assert_no_further([found], [expected], [truth])


@each_class
def test_a_launch_is_enough_and_two_with_the_gradient(cls) -> None:
    (kernel,), x = swapped(cls()), inputs(torch.bfloat16).npu()
    leaf, grad = x.clone().requires_grad_(), torch.ones_like(x)
    assert sum(launched(lambda: kernel(x)).values()) == 1  # of which waits would be counted, too
    assert sum(launched(lambda: torch.autograd.grad(kernel(leaf), leaf, grad)).values()) == 2


@each_class
def test_under_autocast_dtypes_are_the_originals(cls) -> None:
    original, x = cls().npu(), inputs(torch.bfloat16).npu()
    (kernel,) = swapped(original)
    with torch.autocast("npu", torch.bfloat16):
        found, expected = kernel(x), original(x)
    assert found.dtype == expected.dtype


class GeLUFunction(torch.autograd.Function):
    """Bloom's, by its name and its forward, with another gradient."""

    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return bloom_gelu_forward(input)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output


class StraightThroughGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return GeLUFunction.apply(x)


def test_a_node_with_another_gradient_keeps_its_forward() -> None:
    assert find_pattern(StraightThroughGelu) is None
