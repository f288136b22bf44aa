"""The rotary operator against float64: values, gradients, and the limits of the device."""

import pytest
import torch
import torch_npu

# half a unit in the last place of the result, relative: one rounding
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32 = 1e-6  # absolute: two products of numbers of size one and a sum, in float32

# x, cos, and what the layout is called
HALF = [
    ((2, 3, 40, 16), (1, 1, 40, 16), "BNSD, 11SD"),
    ((2, 3, 40, 16), (2, 1, 40, 16), "BNSD, B1SD"),
    ((2, 3, 40, 16), (2, 3, 40, 16), "BNSD, BNSD"),
    ((2, 5, 3, 64), (1, 5, 1, 64), "BSND, 1S1D"),
    ((2, 5, 3, 6), (2, 5, 1, 6), "BSND, BS1D"),
    ((5, 2, 3, 64), (5, 1, 1, 64), "SBND, S11D"),
    ((7, 3, 128), (7, 1, 128), "TND, T1D"),
    ((7, 3, 128), (7, 3, 128), "TND, TND"),
    ((2, 1, 16, 64), (2, 1, 1, 64), "a decode step as BSND, BS1D"),
]
INTERLEAVED = [
    ((2, 3, 4, 16), (1, 1, 4, 16), "11SD"),
    ((2, 5, 3, 6), (1, 5, 1, 6), "1S1D"),
    ((5, 2, 3, 64), (5, 1, 1, 64), "S11D"),
    ((7, 3, 128), (7, 1, 128), "T1D"),
]
CASES = [(x, cos, mode) for mode, shapes in (("half", HALF), ("interleave", INTERLEAVED)) for x, cos, _ in shapes]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def exact(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    """The rotation of pairs, written with complex numbers."""
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if mode == "half" else x.unflatten(-1, (-1, 2))
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1)
    turned = turned.transpose(-1, -2).flatten(-2) if mode == "half" else turned.flatten(-2)
    return x * cos + turned * sin


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("shape", "of_cos", "mode"), CASES)
def test_values_are_rounded_once(shape, of_cos, mode, dtype) -> None:
    if dtype.itemsize == 2 and shape[:2] == (2, 3) and shape[-1] == 16 and mode == "half":
        shape, of_cos = (*shape[:3], 32), (*of_cos[:3], 32)  # halves of 32 bytes
    x, cos, sin = (torch.randn(s).to(dtype) for s in (shape, of_cos, of_cos))
    y = torch_npu.npu_rotary_mul(x.to("npu"), cos.to("npu"), sin.to("npu"), mode)
    expected = exact(x.double(), cos.double(), sin.double(), mode)
    error = (y.cpu().double() - expected).abs()
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert (error <= ROUNDING[dtype] * expected.abs() + FLOAT32).all()


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "of_cos", "mode"), CASES)
def test_gradients(shape, of_cos, mode, dtype, needed) -> None:
    if dtype.itemsize == 2 and shape[:2] == (2, 3) and shape[-1] == 16 and mode == "half":
        shape, of_cos = (*shape[:3], 32), (*of_cos[:3], 32)
    if needed and of_cos[:2] == (2, 1) and shape[1] == 1:
        pytest.skip("B < S is a limit of the gradient of cos")
    tensors = [torch.randn(s).to(dtype) for s in (shape, of_cos, of_cos)]
    leaves = [t.to("npu").requires_grad_(i == 0 or needed) for i, t in enumerate(tensors)]
    truth = [t.double().requires_grad_() for t in tensors]
    dy = torch.randn(shape).to(dtype)
    torch_npu.npu_rotary_mul(*leaves, mode).backward(dy.to("npu"))
    exact(*truth, mode).backward(dy.double())
    assert (leaves[1].grad is not None) == needed
    for found, expected in zip(leaves, truth):
        if found.grad is not None:
            # sums of up to 80 terms in float32, and one rounding
            error = (found.grad.cpu().double() - expected.grad).abs()
            assert found.grad.dtype == dtype
            assert (error <= ROUNDING[dtype] * expected.grad.abs() + 1e-5 * expected.grad.abs().max()).all()


def test_the_gradients_of_cos_and_sin_are_unwritten_unless_asked_for() -> None:
    x, cos = npu(2, 3, 4, 64), npu(2, 3, 1, 64)
    dx, *unwritten = torch.ops.npu.npu_rotary_mul_backward(x, x, cos, cos)
    assert not dx.isnan().any()
    assert all(t.isnan().all() for t in unwritten)


def test_cos_and_sin_of_another_dtype_are_rounded_to_that_of_x() -> None:
    x, cos, sin = torch.randn(4, 2, 16).bfloat16(), torch.randn(4, 1, 16), torch.randn(4, 1, 16)
    y = torch_npu.npu_rotary_mul(x.to("npu"), cos.to("npu"), sin.to("npu"))
    rounded = torch_npu.npu_rotary_mul(x.to("npu"), cos.bfloat16().to("npu"), sin.bfloat16().to("npu"))
    assert torch.equal(y, rounded)


def npu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def rotary(x: tuple, cos: tuple, mode: str = "half", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch_npu.npu_rotary_mul(npu(*x, dtype=dtype), npu(*cos, dtype=dtype), npu(*cos, dtype=dtype), mode)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: rotary((2, 3, 5), (2, 1, 5)), "even"),
        (lambda: rotary((2, 3, 896), (2, 1, 896)), "below 896"),
        (lambda: rotary((3, 64), (3, 64)), "3 or 4 dimensions"),
        (lambda: rotary((0, 3, 64), (0, 1, 64)), "empty"),
        (lambda: rotary((2, 3, 64), (2, 1, 32)), "head size of x"),
        (lambda: rotary((2, 3, 4, 64), (3, 4, 64)), "the dimensions and the head size"),
        (lambda: rotary((2, 3, 4, 64), (1, 3, 4, 64)), "none of the layouts"),
        (lambda: rotary((2, 3, 64), (2, 1, 64), dtype=torch.int32), "int32"),
        (lambda: rotary((2, 3, 64), (2, 1, 64), "quarter"), "half or interleave"),
        (lambda: torch_npu.npu_rotary_mul(npu(2, 3, 8), npu(2, 1, 8), npu(2, 3, 8)), "differ in shape"),
        (lambda: torch_npu.npu_rotary_mul(npu(2, 3, 8), npu(2, 1, 8), npu(2, 1, 8), "half", npu(8, 4)), "rotate must"),
        (lambda: rotary((2, 3, 8, 64), (1, 1, 1, 64)), "none of the layouts"),
        # a decode step: 16 heads for one position
        (lambda: rotary((1, 16, 1, 64), (1, 1, 1, 64)), "B·N <= 8·S"),
        (lambda: rotary((16, 4, 1, 64), (16, 1, 1, 64)), "B·N <= 8·S"),  # though S11D is legal
        (lambda: rotary((2, 3, 40, 16), (2, 1, 40, 16), dtype=torch.bfloat16), "blocks of 32 bytes"),
        (lambda: rotary((1000, 1000, 1, 2), (1000, 1, 1, 2)), "B·N"),
        (lambda: rotary((2, 1000, 2), (2, 1, 2)), "N < 1000"),
        (lambda: rotary((2, 3, 4, 64), (2, 3, 1, 64), "interleave"), "interleave takes cos as"),
        (lambda: rotary((2, 3, 64), (2, 3, 64), "interleave"), "interleave takes cos as"),
        (lambda: rotary((100, 3, 10, 2), (1, 3, 1, 2), "interleave"), "B·N < 1000"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    with pytest.raises(RuntimeError, match=rule) as error:
        call()
    assert "npu_rotary_mul" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "of_cos", "rule"),
    [((2, 3, 600, 2), (2, 3, 1, 2), "B·N <= 1024"), ((4, 2, 3, 64), (4, 2, 1, 64), "B < S")],
)
def test_limits_of_the_gradient_of_cos(shape, of_cos, rule) -> None:
    x, cos, sin = npu(*shape), npu(*of_cos).requires_grad_(), npu(*of_cos)
    with pytest.raises(RuntimeError, match=rule):
        torch_npu.npu_rotary_mul(x, cos, sin).sum().backward()


def test_a_head_size_of_80_needs_no_alignment() -> None:
    rotary((1, 2, 3, 84), (1, 1, 3, 84), dtype=torch.bfloat16)
