"""What the activations launch, within and beyond the limits of their operators, and tensors of other layouts."""

import pytest
import torch

from kernels_ext_npu.selftest.functions.norms import gelu_tanh, quick_gelu
from tests.support import npu_counts

# the function, its formula, and what it calls on the NPU
FUNCTIONS = {
    "gelu_tanh": (gelu_tanh, "gelu", "gelu_backward"),
    "quick_gelu": (quick_gelu, "npu_fast_gelu", "npu_fast_gelu_backward"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(), (3, 7, 33), (1,) * 9, (0, 4)], ids=str)
def test_operators_are_launched_where_they_fit(kernel, name, shape) -> None:
    _, operator, gradient = FUNCTIONS[name]
    x = torch.ones(shape).npu().requires_grad_()
    npu_counts.reset()
    y = getattr(kernel, name)(x)
    y.backward(torch.ones_like(y))
    calls = npu_counts.read()
    fits = name == "gelu_tanh" or (len(shape) <= 8 and x.numel() > 0)
    assert (operator in calls and gradient in calls) == fits
    assert (y.shape, x.grad.shape) == (shape, shape)


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
