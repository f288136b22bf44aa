"""Frozen linear layers with adapters of low rank against float64, in 16 bits, and with adapters of float32."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.measuring.costs import Cost

HALVES = (torch.float16, torch.bfloat16)
# dtypes of layers and of their adapters
DTYPES = [(torch.float32, torch.float32), *zip(HALVES, HALVES), *zip(HALVES, [torch.float32] * 2)]
# the small products are rounded before they are multiplied again: a few roundings, relative to the norm
ROUNDINGS = {torch.float32: 5e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
SIZES, H = (24, 8, 8), 16


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).npu().requires_grad_(trained) for shape in shapes]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]


def layer(x: Tensor, weight: Tensor, bias: Tensor | None, *adapters: tuple) -> Tensor:
    return F.linear(x, weight, bias) + sum(
        s * F.linear(F.linear(x if own is None else own, a), b) for a, b, s, own in adapters
    )


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (found.detach().cpu().double() - expected.detach()).norm() <= ROUNDINGS[dtype] * expected.norm()


@pytest.mark.parametrize(("dtype", "of_adapters"), DTYPES)
@pytest.mark.parametrize(("number", "has_own"), [*product([1, 2], [False, True])])
def test_a_layer_with_adapters_is_that_of_float64(kernel, dtype, of_adapters, number, has_own) -> None:
    torch.manual_seed(0)
    (x,) = drawn((2, 5, H), dtype=dtype)
    (weight,) = drawn((24, H), dtype=dtype, trained=False)
    (bias,) = drawn((24,), dtype=dtype)
    factors = drawn(*[(4, H), (24, 4)] * number, dtype=of_adapters)
    own = drawn(*[(2, 5, H)] * number * has_own, dtype=dtype)
    leaves, truth = [x, bias, *factors, *own], exact([x, bias, *factors, *own])

    def adapters(tensors: list[Tensor]) -> list[tuple]:
        a, b, inputs = tensors[2 : 2 + 2 * number : 2], tensors[3 : 2 + 2 * number : 2], tensors[2 + 2 * number :]
        return [(*pair, 0.5 + i, inputs[i] if has_own else None) for i, pair in enumerate(zip(a, b))]

    y = kernel.lora_linear(x, weight, bias, [kernel.Adapter(*given) for given in adapters(leaves)])
    expected = layer(truth[0], weight.cpu().double(), truth[1], *adapters(truth))
    assert y.dtype == dtype
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad.npu())
    expected.backward(grad.double())
    assert_near(y, expected, dtype)
    for leaf, true in zip(leaves, truth):
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.stride() == leaf.stride()
        assert_near(leaf.grad, true.grad, dtype)
    with torch.no_grad():
        again = kernel.lora_linear(x, weight, bias, [kernel.Adapter(*given) for given in adapters(leaves)])
    assert torch.equal(again, y)


@pytest.mark.parametrize(("dtype", "of_adapters"), DTYPES)
@pytest.mark.parametrize("rows", [5, 64])
def test_layers_of_one_input_are_those_of_float64(kernel, dtype, of_adapters, rows) -> None:
    torch.manual_seed(0)
    x, *weights = drawn((rows, H), *[(n, H) for n in SIZES], dtype=dtype)
    for weight in weights:
        weight.requires_grad_(False)
    factors = drawn(*[shape for n in SIZES for shape in ((4, H), (n, 4))], dtype=of_adapters)
    leaves, truth = [x, *factors], exact([x, *factors])
    scales = (2.0, 1.0, 0.5)

    def given(tensors: list[Tensor]) -> list[tuple]:
        return [(a, b, s, None) for a, b, s in zip(tensors[1::2], tensors[2::2], scales)]

    layers = [(weight, None, kernel.Adapter(*each)) for weight, each in zip(weights, given(leaves))]
    outputs = kernel.lora_linears(x, layers)
    expected = [layer(truth[0], w.cpu().double(), None, each) for w, each in zip(weights, given(truth))]
    grads = [torch.randn(y.shape).to(dtype) for y in outputs]
    torch.autograd.backward(outputs, [grad.npu() for grad in grads], retain_graph=True)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for found, wanted in (*zip(outputs, expected), *((a.grad, b.grad) for a, b in zip(leaves, truth))):
        assert_near(found, wanted, dtype)
    for leaf in leaves:
        leaf.grad = None
    (outputs[1] * grads[1].npu()).sum().backward()  # the others are used by nobody
    assert leaves[1].grad is None
    assert_near(leaves[3].grad, truth[3].grad, dtype)


@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_differentiated(kernel, together) -> None:
    torch.manual_seed(0)
    x, a, b, c, d = drawn((6, H), (4, H), (8, 4), (4, H), (8, 4))
    (weight,) = drawn((8, H), trained=False)

    def ours(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        adapters = kernel.Adapter(a, b, 2.0), kernel.Adapter(c, d, 0.5)
        if together:
            return sum(y.tanh() for y in kernel.lora_linears(x, [(weight, None, adapter) for adapter in adapters]))
        return kernel.lora_linear(x, weight, None, adapters).tanh()

    def truth(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        w, adapters = weight.cpu().double(), ((a, b, 2.0, None), (c, d, 0.5, None))
        if together:
            return sum(layer(x, w, None, each).tanh() for each in adapters)
        return layer(x, w, None, *adapters).tanh()

    def second(function, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    leaves = [x, a, b, c, d]
    for found, expected in zip(second(ours, leaves), second(truth, exact(leaves))):
        assert (found.cpu().double() - expected).norm() <= 2e-5 * expected.norm()


def test_an_adapter_adds_two_launches(kernel) -> None:
    x, a, b = drawn((6, H), (4, H), (8, 4))
    (weight,) = drawn((8, H), trained=False)
    with Cost() as forward:
        y = kernel.lora_linear(x, weight, None, [kernel.Adapter(a, b, 2.0)])
    assert forward.launches.total() == 3
    grad = torch.ones_like(y)
    with Cost() as backward:
        y.backward(grad)
    assert backward.launches.total() == 5


def test_what_has_no_node_is_torchs(kernel) -> None:
    x, a, b = drawn((6, H), (4, H), (8, 4))
    (weight,) = drawn((8, H), trained=True)
    kernel.lora_linear(x, weight, None, [kernel.Adapter(a, b, 2.0)]).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(8, H))
    weight.requires_grad_(False)
    _, found = torch.func.jvp(
        lambda a: kernel.lora_linear(x, weight, None, [kernel.Adapter(a, b, 2.0)]), (a,), (torch.ones_like(a),)
    )
    expected = 2 * F.linear(F.linear(x, torch.ones_like(a)), b)
    torch.testing.assert_close(found, expected)
