"""Layers in few bits: where their operators take them, what is computed elsewhere, and what a gradient keeps."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import softnpu

N, H = 24, 96
PRODUCT, ROUNDING, INT8_PRODUCT = "npu_weight_quant_batchmatmul", "npu_dynamic_quant", "npu_quant_matmul"
BY_WEIGHT, BY_INT8 = {PRODUCT: 1}, {ROUNDING: 1, INT8_PRODUCT: 1}


def drawn(bits: int, group_size: int, dtype: torch.dtype, n: int = N, h: int = H) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, its scales, and what it stands for in float64."""
    torch.manual_seed(0)
    numbers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, h), dtype=torch.int8)
    scale = (torch.rand(n, -(-h // group_size) if group_size else 1) / 8 + 1 / 8).to(dtype)
    exact = numbers.double() * (scale.double().repeat_interleave(group_size, 1)[:, :h] if group_size else scale)
    if bits == 8:
        return numbers, scale, exact
    padded = F.pad(numbers, (0, -h % 8)).long() & 15
    packed = sum((padded[:, place::8] << 4 * place for place in range(8)), torch.zeros(()).long())
    return packed.to(torch.int32), scale, exact


def npu_calls() -> dict[str, int]:
    return {name: count for name, count in softnpu.counters().items() if count and name.startswith("npu_")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "group_size", "options", "called"),
    [
        (8, 0, {}, BY_WEIGHT),
        (8, 32, {}, BY_WEIGHT),
        (8, H, {}, BY_WEIGHT),  # one group is a row
        (8, 48, {}, {}),  # no multiple of 32
        (8, 0, {"rounds_input": True}, BY_INT8),
        (8, 32, {"rounds_input": True}, {}),
        (4, 0, {}, BY_WEIGHT),
        (4, 64, {}, BY_WEIGHT),  # the last group is shorter
        (4, 16, {}, {}),
        (4, 0, {"rounds_input": True}, {}),
    ],
)
def test_it_is_one_operator_where_that_takes_it(
    kernel: ModuleType, dtype: torch.dtype, bits: int, group_size: int, options: dict, called: dict[str, int]
) -> None:
    weight, scale, exact = drawn(bits, group_size, dtype)
    x, bias = torch.randn(2, 3, H).to(dtype), torch.randn(N).to(dtype)
    softnpu.reset_counters()
    given = [t.npu() for t in (x, weight, scale, bias)]
    leaf = given[0].requires_grad_()
    y = kernel.quantised_linear(leaf, *given[1:], group_size, **options)
    assert npu_calls() == called
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad.npu())
    unit, taken = torch.finfo(dtype).eps, x.double()
    if options:
        step = taken.abs().amax(-1, keepdim=True) / 127
        taken = torch.round(taken / step) * step
    expected, terms = F.linear(taken, exact, bias.double()), taken.abs() @ exact.abs().T
    # the result is rounded, and a weight, or in the formula an input, before: not in products of int8
    allowed = unit * expected.abs() + (2.0**-20 if called == BY_INT8 else unit) * terms
    assert ((y.detach().cpu().double() - expected).abs() <= allowed).all()
    expected, terms = grad.double() @ exact, grad.double().abs() @ exact.abs()
    assert ((leaf.grad.cpu().double() - expected).abs() <= unit * (expected.abs() + terms)).all()


@pytest.mark.parametrize(("bits", "n", "h"), [(4, 1, 64), (4, N, 8), (4, N, 60), (8, N, 65536)])
def test_shapes_that_the_operator_does_not_take(kernel: ModuleType, bits: int, n: int, h: int) -> None:
    weight, scale, exact = drawn(bits, 0, torch.float16, n, h)
    x = torch.randn(2, h).half() / 64
    softnpu.reset_counters()
    y = kernel.quantised_linear(x.npu(), weight.npu(), scale.npu())
    assert npu_calls() == {}
    # the weight and the result are rounded
    terms = x.double().abs() @ exact.abs().T
    assert ((y.cpu().double() - x.double() @ exact.T).abs() <= 2.0**-10 * terms).all()


def test_under_autocast_it_computes_in_its_dtype(kernel: ModuleType) -> None:
    weight, scale, _ = (t.npu() if t.dtype is not torch.float64 else t for t in drawn(8, 0, torch.bfloat16))
    x = torch.randn(3, H).npu()
    with torch.autocast("npu", torch.bfloat16):
        y = kernel.quantised_linear(x, weight, scale)
    assert torch.equal(y, kernel.quantised_linear(x.bfloat16(), weight, scale))


@pytest.mark.parametrize("rounds_input", [False, True])
def test_a_graph_without_gradients_has_the_operator(kernel: ModuleType, rounds_input: bool) -> None:
    weight, scale, _ = drawn(8, 0, torch.bfloat16)
    given = [torch.randn(3, H).bfloat16().npu(), weight.npu(), scale.npu()]
    found = torch.compile(kernel.quantised_linear, backend="aot_eager", fullgraph=True)
    softnpu.reset_counters()
    with torch.no_grad():
        y = found(*given, rounds_input=rounds_input)
        assert npu_calls() == (BY_INT8 if rounds_input else BY_WEIGHT)
        assert torch.equal(y, kernel.quantised_linear(*given, rounds_input=rounds_input))


def test_a_gradient_keeps_the_weight_as_it_lies(kernel: ModuleType) -> None:
    weight, scale, _ = drawn(4, 32, torch.bfloat16)
    kept: list[Tensor] = []
    x = torch.randn(3, H).bfloat16().npu().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kernel.quantised_linear(x, weight.npu(), scale.npu(), None, 32)
    assert [(t.shape, t.dtype) for t in kept] == [((N, H // 8), torch.int32), (scale.shape, torch.bfloat16)]


@pytest.mark.parametrize(("x", "weight"), [(torch.int32, torch.int8), (torch.bfloat16, torch.uint8)])
def test_other_dtypes_are_named(kernel: ModuleType, x: torch.dtype, weight: torch.dtype) -> None:
    given = torch.zeros(3, H).to(x).npu(), torch.zeros(N, H).to(weight).npu(), torch.ones(N, 1).bfloat16().npu()
    with pytest.raises(TypeError, match=r"quantised_linear: .* got .*int"):
        kernel.quantised_linear(*given)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (8, 32), (8, 16), (4, 0), (4, 32)])
def test_an_offset_is_added_before_numbers_are_scaled(kernel: ModuleType, bits: int, group_size: int) -> None:
    weight, scale, exact = drawn(bits, group_size, torch.float16)
    offset = torch.randint(-8, 8, scale.shape).half()
    repeated = (offset * scale.double()).repeat_interleave(group_size, 1) if group_size else offset * scale.double()
    exact, x, grad = exact + repeated, torch.randn(3, H).half(), torch.randn(3, N).half()
    leaf = x.npu().requires_grad_()
    softnpu.reset_counters()
    y = kernel.quantised_linear(leaf, weight.npu(), scale.npu(), None, group_size, offset=offset.npu())
    assert npu_calls() == ({} if group_size == 16 else BY_WEIGHT)
    y.backward(grad.npu())
    # a weight and the result are rounded
    for found, given, matrix in ((y, x, exact.T), (leaf.grad, grad, exact)):
        allowed = 2.0**-10 * (given.double().abs() @ matrix.abs())
        assert ((found.detach().cpu().double() - given.double() @ matrix).abs() <= allowed).all()
