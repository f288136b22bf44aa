"""layer_norm of weights and biases with more dimensions than one, and of such that do not fit."""

from types import ModuleType

import pytest
import torch
from torch.nn import functional as F


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8,), (4, 8), (4, 1), (1,), (2, 1, 4, 8), ()])
def test_what_broadcasts_is_multiplied_and_added(kernel: ModuleType, shape, dtype) -> None:
    """In float32 the norm, the product and the sum round: 2^-20 of the largest value."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 4, 8, dtype=dtype), torch.randn(shape), torch.randn(shape)
    found = kernel.layer_norm(x.npu(), weight.npu(), bias.npu(), 1e-6).cpu()
    expected = F.layer_norm(x.double(), (8,), eps=1e-6) * weight + bias
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= 2**-20 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (16,), (3, 8), (2, 2, 4, 8)])
def test_what_would_widen_the_result_or_does_not_fit_is_refused(kernel: ModuleType, shape, dtype) -> None:
    x, part = torch.ones(1, 4, 8, dtype=dtype, device="npu"), torch.ones(shape, dtype=dtype, device="npu")
    for name, parts in {"weight": (part, None), "bias": (None, part)}.items():
        with pytest.raises(ValueError, match=rf"{name} \[.*\] must broadcast to hidden_states \[1, 4, 8\]"):
            kernel.layer_norm(x, *parts, 1e-6)


def test_sums_and_parts_that_do_not_fit_are_refused(kernel: ModuleType) -> None:
    x, part = torch.ones(2, 8, device="npu"), torch.ones(8, device="npu")
    for given in ((x, x[:1], part, part), (x, x, part[:1], part), (x, x, part, part[:7])):
        with pytest.raises(ValueError, match="residual must have the shape of hidden_states"):
            kernel.add_layer_norm(*given, 1e-6)
    with pytest.raises(TypeError, match=r"weight must be floating point, got torch.int64"):
        kernel.layer_norm(x, part.long(), None, 1e-6)
