"""Frozen linear layers with adapters of low rank, in each form that they have, against float64, and their launches."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from kernels_ext_npu.measuring.costs import Cost
from tests.support.nearness import assert_near

HALVES = (torch.float16, torch.bfloat16)
# dtypes of layers and of their adapters
DTYPES = [(torch.float32, torch.float32), *zip(HALVES, HALVES), *zip(HALVES, [torch.float32] * 2)]
# the small products are rounded before they are multiplied again: a few roundings, relative to the norm
ROUNDINGS = {torch.float32: 5e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
H = 16


@dataclass(frozen=True)
class Given:
    """An adapter of a form: the number of its layer, its scale, and what it does to its input."""

    of: int
    scale: float
    p: float = 0.0
    has_own: bool = False
    rank: int = 4


@dataclass(frozen=True)
class Form:
    """A function of the kernel, the sizes of the outputs of its layers, and their adapters."""

    function: str
    sizes: tuple[int, ...]
    adapters: tuple[Given, ...]


FORMS = {
    "one adapter": Form("lora_linear", (24,), (Given(0, 0.5),)),
    "an input of its own": Form("lora_linear", (24,), (Given(0, 0.5, has_own=True),)),
    "two adapters": Form("lora_linear", (24,), (Given(0, 0.5), Given(0, 1.5))),
    "inputs of their own": Form("lora_linear", (24,), (Given(0, 0.5, has_own=True), Given(0, 1.5, has_own=True))),
    "two that drop": Form("lora_linear", (24,), (Given(0, 2.0, 0.25), Given(0, 0.5, 0.5))),
    "layers of one input": Form("lora_linears", (24, 8, 8), (Given(0, 2.0), Given(1, 1.0), Given(2, 0.5))),
    "layers that drop": Form(
        "lora_linears", (24, 8, 8), (Given(0, 2.0, 0.25), Given(1, 1.0, 0.5), Given(2, 0.5, 0.125))
    ),
    "a pair": Form("lora_pair", (24, 24), (Given(0, 2.0), Given(1, 2.0, rank=2))),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).npu().requires_grad_(trained) for shape in shapes]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]


def layer(x: Tensor, weight: Tensor, bias: Tensor | None, *adapters: tuple) -> Tensor:
    """Compute a layer with its adapters: two factors, a scale, and an input or None for that of the layer."""
    return F.linear(x, weight, bias) + sum(
        s * F.linear(F.linear(x if own is None else own, a), b) for a, b, s, own in adapters
    )


def made(
    form: Form, dtype: torch.dtype = torch.float32, of_adapters: torch.dtype = torch.float32, rows: int = 5
) -> tuple[list[Tensor], list[Tensor]]:
    """Draw weights that are frozen, neighbours in memory, and what is trained: an input, a bias, factors and inputs."""
    torch.manual_seed(0)
    (together,) = drawn((sum(form.sizes), H), dtype=dtype, trained=False)
    bias = [(form.sizes[0],)] * (form.function == "lora_linear")
    factors = [shape for each in form.adapters for shape in ((each.rank, H), (form.sizes[each.of], each.rank))]
    own = [(2, rows, H) for each in form.adapters if each.has_own]
    leaves = drawn((2, rows, H), *bias, dtype=dtype) + drawn(*factors, dtype=of_adapters) + drawn(*own, dtype=dtype)
    return [*together.split(form.sizes)], leaves


def parts(form: Form, leaves: list[Tensor]) -> tuple[Tensor, Tensor | None, list[tuple[Tensor, Tensor, Tensor | None]]]:
    x, *rest = leaves
    bias = rest.pop(0) if form.function == "lora_linear" else None
    factors, own = rest[: 2 * len(form.adapters)], iter(rest[2 * len(form.adapters) :])
    inputs = [next(own) if each.has_own else None for each in form.adapters]
    return x, bias, [*zip(factors[::2], factors[1::2], inputs)]


def kernel_results(kernel, form: Form, weights: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    torch.npu.manual_seed(5)
    x, bias, tensors = parts(form, leaves)
    adapters = [kernel.Adapter(a, b, each.scale, own, each.p) for each, (a, b, own) in zip(form.adapters, tensors)]
    if form.function == "lora_linear":
        return (kernel.lora_linear(x, weights[0], bias, adapters),)
    found = getattr(kernel, form.function)(x, [(weights[each.of], None, a) for each, a in zip(form.adapters, adapters)])
    return tuple(found) if form.function == "lora_linears" else (found,)


def expected_results(form: Form, weights: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """In float64, with what dropout multiplies with, in the order in which torch draws it."""
    torch.npu.manual_seed(5)
    x, bias, tensors = parts(form, leaves)
    kept = [F.dropout(torch.ones(x.shape, device="npu"), each.p).cpu().double() for each in form.adapters if each.p]
    if kept:
        tensors = [(a, b, x * mask) for (a, b, _), mask in zip(tensors, kept)]
    outputs = []
    for number, weight in enumerate(weights):
        adapters = [(a, b, each.scale, own) for each, (a, b, own) in zip(form.adapters, tensors) if each.of == number]
        outputs.append(layer(x, weight.cpu().double(), bias, *adapters))
    return (torch.cat(outputs, -1),) if form.function == "lora_pair" else tuple(outputs)


@pytest.mark.parametrize(("dtype", "of_adapters"), DTYPES)
@pytest.mark.parametrize(
    ("name", "rows"), [(name, 5) for name in FORMS] + [(name, 64) for name in FORMS if name.startswith("layers")]
)
def test_results_and_gradients_are_those_of_float64(kernel, name, rows, dtype, of_adapters) -> None:
    form = FORMS[name]
    weights, leaves = made(form, dtype, of_adapters, rows)
    truth = exact(leaves)
    outputs, expected = kernel_results(kernel, form, weights, leaves), expected_results(form, weights, truth)
    grads = [torch.randn(y.shape).to(dtype) for y in outputs]
    torch.autograd.backward(outputs, [grad.npu() for grad in grads], retain_graph=True)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for y, wanted in zip(outputs, expected):
        assert y.dtype == dtype
        assert_near(y, wanted, ROUNDINGS[dtype])
    for leaf, true in zip(leaves, truth):
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.stride() == leaf.stride()
        assert_near(leaf.grad, true.grad, ROUNDINGS[dtype])
        leaf.grad = None
    if len(outputs) > 1:
        (outputs[1] * grads[1].npu()).sum().backward()  # the others are used by nobody
        assert leaves[1].grad is None
        assert_near(leaves[3].grad, truth[3].grad, ROUNDINGS[dtype])
    with torch.no_grad():
        assert all(map(torch.equal, kernel_results(kernel, form, weights, leaves), outputs))


@each_form
@pytest.mark.parametrize("trained", [[0], [-1], [1, 3], [2]], ids=str)
def test_only_what_is_trained_gets_a_gradient(kernel, form, trained) -> None:
    weights, leaves = made(form, torch.bfloat16)
    chosen = [leaves[place] for place in trained if place < len(leaves)]
    for leaf in leaves:
        leaf.requires_grad_(any(leaf is each for each in chosen))
    truth = exact(leaves)
    outputs, expected = kernel_results(kernel, form, weights, leaves), expected_results(form, weights, truth)
    torch.cat(outputs, -1).sum().backward()
    torch.cat(expected, -1).sum().backward()
    for leaf, true in zip(leaves, truth):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad:
            assert_near(leaf.grad, true.grad, ROUNDINGS[torch.bfloat16])


@each_form
def test_a_gradient_of_a_gradient_is_an_error_that_says_what_has_one(kernel, form) -> None:
    weights, leaves = made(form, rows=3)
    outputs = kernel_results(kernel, form, weights, leaves)
    first = torch.autograd.grad(sum(y.tanh().sum() for y in outputs), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"Lora.* has no derivative; .*kernels_ext_npu\.restore\(module\)"):
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


@pytest.mark.parametrize(
    ("name", "of_adapters", "rows", "launches", "saved"),
    [
        ("one adapter", torch.bfloat16, 3, (4, 6), None),
        # what is laid side by side is of the adapters alone
        ("a pair", torch.bfloat16, 5, (8, 7), None),
        ("a pair", torch.float32, 5, (9, 9), None),
        # where each layer is a node, they are 18 and 24 + 5 additions in bfloat16, 21 and 27 + 5 beside float32;
        # the input is kept once, and of each layer three tensors, a mask and what is of the adapter's rank
        ("layers that drop", torch.bfloat16, 64, (15, 24), 1 + 3 * 5),
        ("layers that drop", torch.float32, 64, (16, 28), 1 + 3 * 5),
    ],
)
def test_the_input_is_kept_and_cast_once_and_nothing_large_is_copied(
    kernel, name, of_adapters, rows, launches, saved
) -> None:
    form, kept = FORMS[name], {}
    weights, leaves = made(form, torch.bfloat16, of_adapters, rows)
    if name == "one adapter":
        leaves[1] = leaves[1].detach()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    torch.npu.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Cost() as forward:
        outputs = kernel_results(kernel, form, weights, leaves)
    grads = [torch.ones_like(y) for y in outputs]
    inputs = [leaves[0], leaves[1], leaves[3]] if name == "a pair" else None
    with Cost() as backward:
        torch.autograd.backward(outputs, grads, inputs=inputs)
    assert (forward.launches.total(), backward.launches.total()) == launches
    assert saved is None or len(kept) == saved
    if name == "a pair":
        assert forward.bytes["cat"] + backward.bytes["cat"] == 4 * leaves[1].element_size() * 6 * H


@pytest.mark.parametrize(("dtype", "of_adapters"), DTYPES)
@pytest.mark.parametrize("name", ["one adapter", "layers of one input", "a pair"])
def test_the_device_runs_and_moves_no_more_than_for_pefts_own_calls(kernel, name, dtype, of_adapters) -> None:
    """With what operators do inside, of layers large enough for their adapters to be small."""

    def measured_cost(compute) -> Cost:
        x, *factors = (
            torch.empty(shape, dtype=kind, device="npu", requires_grad=True)
            for shape, kind in [((rows, size), dtype), *((shape, of_adapters) for shape in shapes)]
        )
        weights = torch.empty(sum(sizes), size, dtype=dtype, device="npu").split(sizes)
        with Cost() as cost:
            outputs = compute(x, [*zip(weights, factors[::2], factors[1::2])])
            torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
        return cost

    def ours(x: Tensor, layers: list) -> tuple[Tensor, ...]:
        given = [(weight, None, kernel.Adapter(a, b, 0.7)) for weight, a, b in layers]
        if name == "one adapter":
            return (kernel.lora_linear(x, layers[0][0], None, [given[0][2]]),)
        return tuple(kernel.lora_linears(x, given)) if name != "a pair" else (kernel.lora_pair(x, given),)

    def pefts(x: Tensor, layers: list) -> list[Tensor]:
        return [(F.linear(x, w) + F.linear(F.linear(x.to(a.dtype), a), b) * 0.7).to(x.dtype) for w, a, b in layers]

    rows, size, rank = 512, 1024, 8
    sizes = {"one adapter": [1024], "layers of one input": [1024, 512, 512], "a pair": [1024, 1024]}[name]
    shapes = [shape for out in sizes for shape in ((rank, size), (out, rank))]
    with FakeTensorMode(allow_non_fake_inputs=True):
        found, allowed = measured_cost(ours), measured_cost(pefts)
    assert found.kernels.total() <= allowed.kernels.total()
    assert found.bytes.total() < allowed.bytes.total()


def test_what_has_no_node_is_torchs(kernel) -> None:
    """A weight that is trained, a forward derivative, and what a probability that is none gives."""
    x, a, b = drawn((6, H), (4, H), (8, 4))
    (weight,) = drawn((8, H), trained=True)
    kernel.lora_linear(x, weight, None, [kernel.Adapter(a, b, 2.0)]).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(8, H))
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        kernel.lora_linear(x, weight, None, [kernel.Adapter(a, b, 1.0, None, 2.0)])
    weight.requires_grad_(False)
    _, found = torch.func.jvp(
        lambda a: kernel.lora_linear(x, weight, None, [kernel.Adapter(a, b, 2.0)]), (a,), (torch.ones_like(a),)
    )
    torch.testing.assert_close(found, 2 * F.linear(F.linear(x, torch.ones_like(a)), b))
    form = FORMS["layers that drop"]
    weights, leaves = made(form)
    expected = expected_results(form, weights, exact(leaves))
    for found, wanted in zip(kernel_results(kernel, form, [w.requires_grad_() for w in weights], leaves), expected):
        assert_near(found, wanted, ROUNDINGS[torch.float32])


def test_a_weight_of_a_pair_that_was_changed_in_place_is_an_error(kernel) -> None:
    weights, leaves = made(FORMS["a pair"])
    (y,) = kernel_results(kernel, FORMS["a pair"], weights, leaves)
    weights[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_no_pair_is_not_computed(kernel) -> None:
    (first, second), (x, a, b, c, d) = made(FORMS["a pair"])
    one, other, bias = kernel.Adapter(a, b, 2.0), kernel.Adapter(c, d, 2.0), torch.zeros(24, device="npu")
    for layers in (
        [(first, None, one), (second.clone(), None, other)],
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
