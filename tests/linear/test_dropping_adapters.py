"""Adapters that drop elements of their input, against float64 with the masks that torch draws for the same seed."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.measuring.costs import Cost
from tests.linear.test_adapter_functions import DTYPES, SIZES, H, assert_near, drawn, exact, layer

P = (0.25, 0.5, 0.125)
SCALES = (2.0, 1.0, 0.5)


def kept(shape: torch.Size, number: int) -> list[Tensor]:
    """What dropout multiplies with, in the order in which torch draws it."""
    torch.npu.manual_seed(5)
    return [F.dropout(torch.ones(shape, device="npu"), p).cpu().double() for p in P[:number]]


def made(dtype: torch.dtype, of_adapters: torch.dtype, rows: int, sizes: tuple[int, ...] = SIZES) -> tuple[list, list]:
    """Weights that are frozen, and what is trained: an input, and two factors for each of them."""
    torch.manual_seed(0)
    weights = drawn(*[(n, H) for n in sizes], dtype=dtype, trained=False)
    factors = drawn(*[shape for n in sizes for shape in ((4, H), (n, 4))], dtype=of_adapters)
    return weights, [*drawn((2, rows, H), dtype=dtype), *factors]


def together(kernel, weights: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    x, a, b = leaves[0], leaves[1::2], leaves[2::2]
    adapters = [kernel.Adapter(*each) for each in zip(a, b, SCALES, [None] * len(a), P)]
    return kernel.lora_linears(x, [(weight, None, adapter) for weight, adapter in zip(weights, adapters)])


def expected_of(weights: list[Tensor], leaves: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    x, a, b = leaves[0], leaves[1::2], leaves[2::2]
    return [layer(x, w.cpu().double(), None, (*each, x * mask)) for w, mask, *each in zip(weights, masks, a, b, SCALES)]


@pytest.mark.parametrize(("dtype", "of_adapters"), DTYPES)
@pytest.mark.parametrize("rows", [5, 64])
def test_layers_of_one_input_are_those_of_float64(kernel, dtype, of_adapters, rows) -> None:
    weights, leaves = made(dtype, of_adapters, rows)
    truth, masks = exact(leaves), kept(leaves[0].shape, 3)
    torch.npu.manual_seed(5)
    outputs, expected = together(kernel, weights, leaves), expected_of(weights, truth, masks)
    grads = [torch.randn(y.shape).to(dtype) for y in outputs]
    torch.autograd.backward(outputs, [grad.npu() for grad in grads], retain_graph=True)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for found, wanted in (*zip(outputs, expected), *((a.grad, b.grad) for a, b in zip(leaves, truth))):
        assert_near(found, wanted, dtype)
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype
        leaf.grad = None
    (outputs[1] * grads[1].npu()).sum().backward()  # the others are used by nobody
    assert leaves[1].grad is None
    assert_near(leaves[3].grad, truth[3].grad, dtype)
    torch.npu.manual_seed(5)
    with torch.no_grad():
        assert all(map(torch.equal, together(kernel, weights, leaves), outputs))


@pytest.mark.parametrize(("dtype", "of_adapters"), DTYPES)
def test_two_adapters_of_a_layer_are_those_of_float64(kernel, dtype, of_adapters) -> None:
    (weight, *_), leaves = made(dtype, of_adapters, 5, (24, 24))
    truth, masks = exact(leaves), kept(leaves[0].shape, 2)
    torch.npu.manual_seed(5)
    x, a, b, c, d = leaves
    adapters = kernel.Adapter(a, b, 2.0, None, P[0]), kernel.Adapter(c, d, 0.5, None, P[1])
    y = kernel.lora_linear(x, weight, None, adapters)
    x, a, b, c, d = truth
    given = (a, b, 2.0, x * masks[0]), (c, d, 0.5, x * masks[1])
    expected = layer(x, weight.cpu().double(), None, *given)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad.npu())
    expected.backward(grad.double())
    for found, wanted in ((y, expected), *((leaf.grad, true.grad) for leaf, true in zip(leaves, truth))):
        assert_near(found, wanted, dtype)


@pytest.mark.parametrize("number", [1, 3])
def test_gradients_are_differentiated(kernel, number) -> None:
    weights, leaves = made(torch.float32, torch.float32, 3, SIZES[:number])
    masks = kept(leaves[0].shape, number)

    def second(outputs: list[Tensor] | tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(sum(y.tanh().sum() for y in outputs), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    torch.npu.manual_seed(5)
    outputs, truth = together(kernel, weights, leaves), exact(leaves)
    for found, wanted in zip(second(outputs, leaves), second(expected_of(weights, truth, masks), truth)):
        assert (found.cpu().double() - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize(("of_adapters", "launches"), [(torch.bfloat16, (12, 24)), (torch.float32, (16, 28))])
def test_the_input_is_kept_once_and_cast_once(kernel, of_adapters, launches) -> None:
    """Where each layer is a node, they are 15 and 24 + 5 additions in bfloat16, 18 and 27 + 5 beside float32."""
    weights, leaves = made(torch.bfloat16, of_adapters, 64)
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Cost() as forward:
        outputs = together(kernel, weights, leaves)
    small = [t for t in saved.values() if t.shape == (128, 4)]
    masks = [t for t in saved.values() if t.dtype in (torch.bool, torch.uint8)]
    assert (len(small), len(masks)) == (3, 3)
    assert len(saved) == 1 + 3 + 3 + 3 * 3  # the input, and of each layer the weights and what is listed above
    grads = [torch.ones_like(y) for y in outputs]
    with Cost() as backward:
        torch.autograd.backward(outputs, grads)
    assert (forward.launches.total(), backward.launches.total()) == launches


def test_what_torch_computes_draws_too(kernel) -> None:
    """A weight that is trained has no such node; a probability that is none is torch's error."""
    (weight,), leaves = made(torch.float32, torch.float32, 5, (24,))
    (mask,), truth = kept(leaves[0].shape, 1), exact(leaves)
    torch.npu.manual_seed(5)
    (y,) = together(kernel, [weight.requires_grad_()], leaves)
    (expected,) = expected_of([weight.detach()], truth, [mask])
    assert_near(y, expected, torch.float32)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        kernel.lora_linear(leaves[0], weight, None, [kernel.Adapter(leaves[1], leaves[2], 1.0, None, 2.0)])
