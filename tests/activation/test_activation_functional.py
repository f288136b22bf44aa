"""The functions against float64, within and beyond the limits of their operators."""

import math

import pytest
import torch
from torch import Tensor

import softnpu

SHAPES = [(), (5,), (3, 7, 33), (1,) * 9, (0, 4)]


def gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def quick_gelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


# the function, its formula, and what it calls on the NPU
FUNCTIONS = {
    "gelu_tanh": (gelu_tanh, "gelu", "gelu_backward"),
    "quick_gelu": (quick_gelu, "npu_fast_gelu", "npu_fast_gelu_backward"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # of one rounding at the end; tanh, exp and the products add a few of float32's 2^-24
    [(torch.float32, 2e-6), (torch.bfloat16, 2.0**-8 + 2e-6), (torch.float16, 2.0**-10 + 2e-6)],
)
def test_values_and_gradients_are_those_of_float64(kernel, name, shape, dtype, tolerance) -> None:
    formula, operator, gradient = FUNCTIONS[name]
    x = torch.linspace(-4, 4, torch.Size(shape).numel()).view(shape).to(dtype)
    leaf, exact = x.npu().requires_grad_(), x.double().requires_grad_()
    softnpu.reset_counters()
    y = getattr(kernel, name)(leaf)
    y.backward(torch.ones_like(y))
    calls = softnpu.counters()
    fits = name == "gelu_tanh" or (len(shape) <= 8 and x.numel() > 0)
    assert (operator in calls and gradient in calls) == fits
    assert calls["stream_syncs"] == 0
    expected = formula(exact)
    expected.sum().backward()
    beyond = 1 if fits else 4  # torch rounds each of its steps
    for found, wanted in ((y, expected), (leaf.grad, exact.grad)):
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.detach().cpu().double(), wanted.detach(), rtol=tolerance * beyond, atol=tolerance * beyond
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_image_models_permute_is_taken_as_the_originals_take_it(kernel, name) -> None:
    """torch_npu's own GELU raises for such a tensor, and the steps that transformers writes out do not."""
    x = torch.linspace(-4, 4, 256).view(2, 4, 4, 8).permute(0, 3, 1, 2)
    for grad in (torch.ones(2, 8, 4, 4), torch.ones(2, 4, 4, 8).permute(0, 3, 1, 2)):
        leaf, exact = x.npu().requires_grad_(), x.double().requires_grad_()
        y, expected = getattr(kernel, name)(leaf), FUNCTIONS[name][0](exact)
        y.backward(grad.npu())
        expected.backward(grad.double())
        for found, wanted in ((y, expected), (leaf.grad, exact.grad)):
            torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_is_computed_in_float64(kernel, name) -> None:
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    found = getattr(kernel, name)(x.npu())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.cpu(), FUNCTIONS[name][0](x), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strided_tensors_are_taken_as_they_are(kernel, name) -> None:
    x = torch.randn(6, 8).npu().t()
    torch.testing.assert_close(getattr(kernel, name)(x), getattr(kernel, name)(x.contiguous()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_integers_are_refused(kernel, name) -> None:
    with pytest.raises(TypeError, match=f"{name}: x must be floating point, got torch.int64"):
        getattr(kernel, name)(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_holds_them_whole(kernel, name) -> None:
    """Backend aot_eager, forward and gradient."""
    function = getattr(kernel, name)
    x = torch.randn(3, 8).npu()
    plain, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = function(plain)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(compiled)
    for y in (expected, found):
        y.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(compiled.grad, plain.grad)
