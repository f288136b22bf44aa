"""Linear layers, alone and several of one input, against float64; and what their gradients launch."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.measuring.costs import Cost
from tests.support import npu_counts
from tests.support.nearness import assert_near

# of one rounding at the end, relative to the norm; a sum of gradients of x that are added one by one rounds three times
ROUNDING = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SIZES = (24, 8, 8)  # of outputs: queries, keys and values


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def on_npu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().npu().requires_grad_() for tensor in tensors]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("biases", "rows"), [*product([False, True], [2, 64])])  # few rows are gone through one by one
def test_several_layers_of_one_input_are_those_of_float64(kernel, dtype, biases, rows) -> None:
    tensors = drawn((2, rows, 16), *[(n, 16) for n in SIZES], *[(n,) for n in SIZES] * biases, dtype=dtype)
    leaves, truth = on_npu(tensors), exact(tensors)
    npu_counts.reset()
    outputs = kernel.linears(leaves[0], leaves[1:4], leaves[4:] or None)
    expected = [F.linear(truth[0], w, b) for w, b in zip(truth[1:4], truth[4:] or [None] * 3)]
    grads = [torch.randn(y.shape).to(dtype) for y in outputs]
    torch.autograd.backward(outputs, [grad.npu() for grad in grads])
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert npu_counts.read()["npu_linear_backward"] == (1 if rows == 64 else 3)
    for found, wanted in (*zip(outputs, expected), *((a.grad, b.grad) for a, b in zip(leaves, truth))):
        assert found.dtype == dtype
        assert_near(found, wanted, ROUNDING[dtype])


def test_no_gradient_of_a_weight_is_copied(kernel) -> None:
    for together, launches in ((False, {"npu_linear_backward": 1}), (True, {"cat": 2, "npu_linear_backward": 1})):
        x, *weights = on_npu(drawn((64, 16), *[(n, 16) for n in SIZES]))
        outputs = kernel.linears(x, weights) if together else [kernel.linear(x, weights[0])]
        grads = [torch.randn_like(y) for y in outputs]
        with Cost() as cost:
            torch.autograd.backward(outputs, grads)
        assert dict(cost.launches) == launches
        assert all(weight.grad.stride() == weight.stride() for weight in weights[: len(outputs)])


def test_only_what_is_wanted_is_computed(kernel) -> None:
    x, weight = on_npu(drawn((4, 16), (8, 16)))
    weight.requires_grad_(False)
    with Cost() as frozen:
        kernel.linear(x, weight).sum().backward()
    x.grad = None
    with Cost() as expected:
        F.linear(x, weight).sum().backward()
    assert frozen.launches == expected.launches
    x, first, second = on_npu(drawn((4, 16), (8, 16), (8, 16)))
    kernel.linears(x, [first, second])[0].sum().backward()
    assert second.grad is None
    torch.testing.assert_close(x.grad, first.detach().sum(0).expand(4, 16))
    x = x.detach()
    (gradient,) = torch.autograd.grad(kernel.linears(x, [first, second])[1].sum(), second)
    torch.testing.assert_close(gradient, x.sum(0).expand(8, 16))


def test_no_rows_strided_rows_and_rows_of_another_dtype(kernel) -> None:
    x, weight, other = on_npu(drawn((0, 16), (8, 16), (8, 16)))
    for y in (kernel.linear(x, weight), *kernel.linears(x, [weight, other])):
        assert y.shape == (0, 8)
        y.sum().backward()
    assert not weight.grad.any()
    strided = on_npu(drawn((16, 6)))[0]
    kernel.linear(strided.t(), weight).sum().backward()
    torch.testing.assert_close(strided.grad.t(), weight.detach().sum(0).expand(6, 16))
    with pytest.raises(RuntimeError):
        kernel.linear(strided.t().bfloat16(), weight)
    with pytest.raises(RuntimeError):
        kernel.linear(strided, weight)
    with pytest.raises(ValueError, match="2 weights need as many biases, got 1"):
        kernel.linears(strided.t(), [weight, other], [None])


@pytest.mark.parametrize("together", [False, True])
def test_under_autocast_it_computes_what_torch_does(kernel, together) -> None:
    def step(function) -> list[Tensor]:
        x, weight, other = leaves = on_npu(drawn((64, 16), (8, 16), (8, 16)))
        with torch.autocast("npu", torch.bfloat16):
            outputs = function(x, weight, other)
        assert {y.dtype for y in outputs} == {torch.bfloat16}
        sum(y.float().sum() for y in outputs).backward()
        assert all(leaf.grad.dtype == leaf.dtype and leaf.grad.is_contiguous() for leaf in leaves)
        return [*outputs, *(leaf.grad for leaf in leaves)]

    def ours(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return list(kernel.linears(x, weights)) if together else [kernel.linear(x, weight) for weight in weights]

    for found, expected in zip(step(ours), step(lambda x, *w: [F.linear(x, each) for each in w])):
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-7)
