"""Sums over many 16-bit numbers, which the device keeps in float32 and rounds once, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import softnpu

NARROW = [torch.bfloat16, torch.float16]
ROWS = 4096
INDEX = torch.zeros(ROWS, dtype=torch.int64)


def numbers(*shape: int) -> Tensor:
    """Positive numbers, whose sum in 16 bits stops growing long before its end."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.1


def gradient(function: Callable[..., Tensor], of: int, *inputs: Tensor) -> Tensor:
    """Return the gradient of one input, for a gradient of the result that has the same numbers everywhere."""
    inputs = tuple(t.detach().requires_grad_(i == of) for i, t in enumerate(inputs))
    result = function(*inputs)
    (found,) = torch.autograd.grad(result, inputs[of], numbers(*result.shape).to(torch.bfloat16).to(result))
    return found


def put(x: Tensor, values: Tensor) -> Tensor:
    return x.index_put((INDEX.to(x.device),), values, accumulate=True)


SUMS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "index_put": (put, (numbers(3, 2), numbers(ROWS, 2))),
    "index_add_ to a view": (
        lambda x, v: x.clone()[::2].index_add_(0, INDEX.to(x.device), v),
        (numbers(6), numbers(ROWS)),
    ),
    "prod": (lambda x: x.prod(0), (numbers(32, 2) + 0.85,)),
    "embedding": (lambda w: gradient(lambda w: F.embedding(INDEX.to(w.device), w), 0, w), (numbers(3, 2),)),
    "index": (lambda w: gradient(lambda w: w[INDEX.to(w.device)], 0, w), (numbers(3, 2),)),
    "repeat_interleave": (
        lambda w: gradient(lambda w: w.repeat_interleave(torch.tensor([ROWS, 1], device=w.device), 0), 0, w),
        (numbers(2, 3),),
    ),
    "layer norm's bias": (
        lambda x, w, b: gradient(lambda x, w, b: F.layer_norm(x, (2,), w, b), 2, x, w, b),
        (numbers(ROWS, 2), numbers(2), numbers(2)),
    ),
    "linear's weight": (lambda x, w: gradient(F.linear, 1, x, w), (numbers(4, 1024, 2), numbers(3, 2))),
    "a matrix times a batch": (lambda x, y: gradient(torch.matmul, 0, x, y), (numbers(3, 2), numbers(4, 2, 1024))),
    "a convolution's weight": (
        lambda x, w: gradient(F.conv1d, 1, x, w),
        (numbers(4, 2, 1024), numbers(2, 2, 3)),
    ),
    "replicated padding": (
        lambda x: gradient(lambda x: F.pad(x, (1024, 0), mode="replicate"), 0, x),
        (numbers(1, 2, 3),),
    ),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Half an ulp for the rounding, and 2^-20 for the sum in float32 of up to 4096 numbers of one sign."""
    function, inputs = SUMS[name]
    inputs = tuple(t.to(dtype) for t in inputs)
    found = function(*(t.to("npu") for t in inputs))
    expected = function(*(t.double() for t in inputs))
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), expected, rtol=torch.finfo(dtype).eps / 2 + 2**-20, atol=0)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("loss", ["binary cross entropy with logits", "kl_div", "kl_div of logarithms"])
def test_the_gradient_of_a_loss_is_rounded_once(loss: str, dtype: torch.dtype) -> None:
    """Half an ulp and, for terms that cancel, float32's own error relative to terms of at most 1: 2^-22."""
    x, target = (-numbers(64, 8) * 30).to(dtype), numbers(64, 8).to(dtype)
    losses = {
        "binary cross entropy with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        "kl_div": lambda x, y: F.kl_div(x, y, reduction="none"),
        "kl_div of logarithms": lambda x, y: F.kl_div(x, -y, reduction="none", log_target=True),
    }
    found = gradient(losses[loss], 0, x.to("npu"), target.to("npu"))
    expected = gradient(losses[loss], 0, x.double(), target.double())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=torch.finfo(dtype).eps / 2 + 2**-22, atol=2**-22)


def test_statistics_and_gradients_of_weights_are_float32_as_op_plugin_allocates_them() -> None:
    x, w = (torch.ones(*shape, dtype=torch.bfloat16, device="npu") for shape in ((4, 3), (3,)))
    y, mean, rstd = torch.native_layer_norm(x, (3,), w, w, 1e-5)
    assert [t.dtype for t in (y, mean, rstd)] == [torch.bfloat16, torch.float32, torch.float32]
    backward = torch.ops.aten.native_layer_norm_backward(y, x, (3,), mean, rstd, w, w, [True] * 3)
    assert [t.dtype for t in backward] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_batch_of_products_with_one_matrix_is_one_product() -> None:
    """Nothing is left for autograd to sum up, unless both factors have a batch and one is broadcast."""
    for left, right, sums in (((2, 3, 4), (4, 5), 0), ((3, 4), (2, 4, 5), 0), ((2, 2, 3, 4), (2, 4, 5), 1)):
        x, y = (torch.ones(*shape, device="npu", requires_grad=True) for shape in (left, right))
        product = x @ y
        softnpu.reset_counters()
        product.backward(torch.ones_like(product))
        assert (x.grad.shape, y.grad.shape) == (left, right)
        assert softnpu.counters().get("sum", 0) == sums, (left, right)
