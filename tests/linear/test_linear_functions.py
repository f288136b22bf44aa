"""Linear layers, alone and several of one input, against float64; and what their gradients launch."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import softnpu
from kernels_ext_npu.measuring.costs import Cost

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


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found.detach().cpu().double() - expected.detach()).norm() <= ROUNDING[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("biases", "rows"), [*product([False, True], [2, 64])])  # few rows are gone through one by one
def test_several_layers_of_one_input_are_those_of_float64(kernel, dtype, biases, rows) -> None:
    tensors = drawn((2, rows, 16), *[(n, 16) for n in SIZES], *[(n,) for n in SIZES] * biases, dtype=dtype)
    leaves, truth = on_npu(tensors), exact(tensors)
    softnpu.reset_counters()
    outputs = kernel.linears(leaves[0], leaves[1:4], leaves[4:] or None)
    expected = [F.linear(truth[0], w, b) for w, b in zip(truth[1:4], truth[4:] or [None] * 3)]
    grads = [torch.randn(y.shape).to(dtype) for y in outputs]
    torch.autograd.backward(outputs, [grad.npu() for grad in grads])
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert softnpu.counters()["npu_linear_backward"] == (1 if rows == 64 else 3)
    for found, wanted in (*zip(outputs, expected), *((a.grad, b.grad) for a, b in zip(leaves, truth))):
        assert_near(found, wanted, dtype)


def test_one_product_is_nearer_to_float64_than_a_sum_of_products(kernel) -> None:
    tensors = drawn((512, 64), *[(64, 64)] * 3, dtype=torch.bfloat16)
    grads = drawn(*[(512, 64)] * 3, dtype=torch.bfloat16)
    expected = sum(grad.double() @ weight.double() for grad, weight in zip(grads, tensors[1:]))
    distances = []
    for function in (lambda x, *w: kernel.linears(x, w), lambda x, *w: [F.linear(x, each) for each in w]):
        leaves = on_npu(tensors)
        torch.autograd.backward(function(*leaves), [grad.npu() for grad in grads])
        distances.append((leaves[0].grad.cpu().double() - expected).norm().item())
    assert distances[0] < distances[1]


def launches(function, leaves: list[Tensor]) -> Cost:
    """Of a backward: from outputs to the gradients that parameters hold."""
    outputs = function()
    grads = [torch.randn_like(y) for y in outputs]
    with Cost() as cost:
        torch.autograd.backward(outputs, grads)
    assert all(leaf.grad.stride() == leaf.stride() for leaf in leaves)
    return cost


def test_no_gradient_of_a_weight_is_copied(kernel) -> None:
    shapes = (64, 16), *[(n, 16) for n in SIZES]
    x, *weights = on_npu(drawn(*shapes))
    assert dict(launches(lambda: [kernel.linear(x, weights[0])], weights[:1]).launches) == {"npu_linear_backward": 1}
    x, *weights = on_npu(drawn(*shapes))
    together = launches(lambda: kernel.linears(x, weights), weights).launches
    assert dict(together) == {"cat": 2, "npu_linear_backward": 1}
    x, *weights = on_npu(drawn(*shapes))
    apart = launches(lambda: [F.linear(x, weight) for weight in weights], weights).launches
    assert apart["copy_"] == 3  # what torch_npu's gradients cost
    assert apart["add"] == 2


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


def test_gradients_are_differentiated(kernel) -> None:
    tensors = drawn((64, 16), *[(n, 16) for n in SIZES])

    def second(function, leaves: list[Tensor]) -> list[Tensor]:
        y = torch.cat(function(*leaves), -1).square().mean()
        first = torch.autograd.grad(y, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    found = second(lambda x, *w: (*kernel.linears(x, w), kernel.linear(x, w[0])), on_npu(tensors))
    expected = second(lambda x, *w: (*(F.linear(x, each) for each in w), F.linear(x, w[0])), exact(tensors))
    for a, b in zip(found, expected):
        assert (a.cpu().double() - b).norm() <= 1e-5 * b.norm()


def test_transforms_and_forward_derivatives_are_torchs(kernel) -> None:
    x, weight = (tensor.npu() for tensor in drawn((4, 16), (8, 16)))
    tangent = torch.ones_like(weight)
    _, found = torch.func.jvp(lambda w: kernel.linears(x, [w, w])[0], (weight,), (tangent,))
    torch.testing.assert_close(found, F.linear(x, tangent))
    torch.testing.assert_close(torch.func.grad(lambda w: kernel.linear(x, w).sum())(weight), x.sum(0).expand(8, 16))


def test_a_weight_that_was_changed_since_is_no_gradients(kernel) -> None:
    x, weight, other = on_npu(drawn((4, 16), (8, 16), (8, 16)))
    for y in (kernel.linear(x, weight), kernel.linears(x, [weight, other])[1]):
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


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


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16)])
def test_what_a_layer_gives_may_be_written_to(kernel, shape) -> None:
    """As models do that set what is padded to zero."""
    x, weight, a, b = drawn(shape, (8, 16), (2, 16), (8, 2))
    adapter = kernel.Adapter(a.npu().requires_grad_(), b.npu().requires_grad_(), 2.0)
    (x, weight), frozen = on_npu([x, weight]), weight.npu()
    outputs = [
        kernel.linear(x, weight),
        *kernel.linears(x, [weight, weight]),
        kernel.lora_linear(x, frozen, None, [adapter]),
        *kernel.lora_linears(x, [(frozen, None, adapter)] * 2),
    ]
    for y in outputs:
        y[..., :3] = 0
    sum(y.sum() for y in outputs).backward()
    assert not weight.grad[:3].any()
    assert not adapter.b.grad[:3].any()
    assert weight.grad[3:].all()
