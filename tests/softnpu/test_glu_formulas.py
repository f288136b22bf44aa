"""The gated linear units against float64 and torch's autograd, with the rounding of the device's kernels."""

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from softnpu.formulas import glu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [((64,), -1), ((5, 128), -1), ((3, 64, 7), 1), ((128, 3, 2), 0), ((2, 3, 192), 2)]  # shape and dim
APPROXIMATE = {0: "none", 1: "tanh"}
# half a unit in the last place of the result, relative: one rounding
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# half the spacing of the smallest numbers, where rounding is absolute
UNDERFLOW = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}
FLOAT32 = 16 * 2.0**-24  # of about ten operations in float32, each half a unit in the last place, exp and erf one

swiglu_backward, geglu_grad = torch.ops.npu.npu_swiglu_backward, torch.ops.npu.npu_geglu_grad


def sample(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Up to some ±12: both tails of the activations, and beyond the limit of the clipped form."""
    return (3 * torch.randn(shape)).to(dtype)


def swiglu(x: torch.Tensor, dim: int) -> torch.Tensor:
    a, b = x.chunk(2, dim)
    return F.silu(a) * b


def geglu(x: torch.Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x.chunk(2, dim)
    gelu = F.gelu(a if activate_left else b, approximate=APPROXIMATE[approximate])
    return gelu * (b if activate_left else a), gelu


def clipped_swiglu(rows: torch.Tensor, interleaved: bool, alpha=1.702, limit=7.0, bias=1.0) -> torch.Tensor:
    a, b = (rows[..., ::2], rows[..., 1::2]) if interleaved else rows.chunk(2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + bias)


def gradient(function, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """By torch's autograd in float64."""
    leaf = x.double().requires_grad_()
    function(leaf).backward(dy.double())
    return leaf.grad


def assert_rounded_once(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As near as the float64 value rounded once, but for the error of float32 inside: off by one unit in the last
    place only next to a tie. A second rounding to 16 bits does not pass."""
    error, best = ((t.cpu().double() - expected).abs() for t in (found, expected.to(found.dtype)))
    assert (error <= best + FLOAT32 * expected.abs()).all(), (error - best).max()


def assert_close(found: torch.Tensor, expected: torch.Tensor, roundings: int) -> None:
    """Where float32 loses digits, in 1 + erf and in slopes near zero, its error is relative to the operands."""
    error = (found.cpu().double() - expected).abs()
    rounding = roundings * (ROUNDING[found.dtype] * expected.abs() + UNDERFLOW[found.dtype])
    assert (error <= rounding + FLOAT32 * expected.abs().max()).all(), error.max()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
def test_swiglu_rounds_once(shape, dim, dtype) -> None:
    x = sample(*shape, dtype=dtype)
    y = torch_npu.npu_swiglu(x.npu(), dim)
    assert (y.dtype, y.is_contiguous()) == (dtype, True)
    assert_rounded_once(y, swiglu(x.double(), dim))


def test_swiglu_activates_the_first_half_along_the_last_dimension() -> None:
    x = torch.tensor([[1.0, 100.0]])
    assert torch_npu.npu_swiglu(x.npu()).item() == pytest.approx(F.silu(torch.tensor(1.0)).item() * 100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((5, 128), -1), ((64, 3, 2), 0), ((2, 64, 3), -2)])
def test_swiglu_backward_is_the_gradient(shape, dim, dtype) -> None:
    x = sample(*shape, dtype=dtype)
    dy = torch.randn(swiglu(x, dim).shape).to(dtype)
    expected = gradient(lambda leaf: swiglu(leaf, dim), x, dy)
    leaf = x.npu().requires_grad_()
    torch_npu.npu_swiglu(leaf, dim).backward(dy.npu())
    for found in (glu.npu_swiglu_backward(dy, x, dim), leaf.grad):
        assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, x.shape, True)
        assert_close(found, expected, roundings=1)


def test_the_gradient_of_a_sum_is_expanded_and_taken() -> None:
    x = torch.randn(2, 32)
    leaf = x.npu().requires_grad_()
    torch_npu.npu_swiglu(leaf).sum().backward()
    assert_close(leaf.grad, gradient(lambda leaf: swiglu(leaf, -1), x, torch.ones(2, 16)), roundings=1)


@pytest.mark.parametrize("activate_left", [False, True])
@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
def test_geglu(shape, dim, dtype, approximate, activate_left) -> None:
    x = sample(*shape, dtype=dtype)
    y, gelu = torch_npu.npu_geglu(x.npu(), dim, approximate, activate_left)
    expected, expected_gelu = geglu(x.double(), dim, approximate, activate_left)
    assert (y.dtype, gelu.dtype, y.is_contiguous()) == (dtype, dtype, True)
    # float16 rounds gelu and the product
    assert_close(y, expected, roundings=2 if dtype == torch.float16 else 1)
    assert_close(gelu, expected_gelu, roundings=1)


def test_geglu_by_default_activates_the_right_half_with_tanh() -> None:
    x = sample(4, 64, dtype=torch.float32).npu()
    for found, expected in zip(torch_npu.npu_geglu(x), torch_npu.npu_geglu(x, -1, 1, False)):
        assert torch.equal(found, expected)
    assert not torch.equal(torch_npu.npu_geglu(x)[1], torch_npu.npu_geglu(x, approximate=0)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_float16_multiplies_with_the_rounded_gelu(dtype) -> None:
    x = sample(16, 128, dtype=dtype)
    y, gelu = (t.cpu() for t in torch_npu.npu_geglu(x.npu(), activate_left=True))
    assert torch.equal(y, x.chunk(2, -1)[1] * gelu) == (dtype == torch.float16)


def test_geglu_takes_non_contiguous_input() -> None:
    x = torch.randn(64, 4)
    y, gelu = torch_npu.npu_geglu(x.npu().t())
    assert y.is_contiguous()
    assert gelu.is_contiguous()
    assert_close(y, geglu(x.t().double(), -1, 1, False)[0], roundings=1)


@pytest.mark.parametrize("activate_left", [False, True])
@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((5, 14), -1), ((6, 3, 2), 0), ((2, 64, 3), -2)])
def test_geglu_grad_is_the_gradient(shape, dim, dtype, approximate, activate_left) -> None:
    x = sample(*shape, dtype=dtype)
    options = dim, approximate, activate_left
    dy = torch.randn(geglu(x.double(), *options)[0].shape).to(dtype)
    expected = gradient(lambda leaf: geglu(leaf, *options)[0], x, dy)
    leaf = x.npu().requires_grad_()
    y, gelu = torch_npu.npu_geglu(leaf, *options)
    assert not gelu.requires_grad
    y.backward(dy.npu())
    for found in (glu.npu_geglu_grad(dy, x, gelu.cpu(), *options), leaf.grad):
        assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, x.shape, True)
        # of the other half: gelu, and its product; of the activated half in float16: dy · other, and the result
        assert_close(found, expected, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu_grad_rounds_between_its_products_in_float16_only(dtype) -> None:
    x, dy, gelu = sample(16, 64, dtype=dtype), sample(16, 32, dtype=dtype), sample(16, 32, dtype=dtype)
    activated, other = x.chunk(2, -1)
    found = geglu_grad(dy.npu(), x.npu(), gelu.npu(), activate_left=True).cpu().chunk(2, -1)
    weighted = dy * other if dtype == torch.float16 else dy.double() * other.double()
    assert_close(found[0], gradient(lambda leaf: F.gelu(leaf, approximate="tanh"), activated, weighted), roundings=1)
    assert torch.equal(found[1], dy * gelu)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipped_swiglu_rounds_once(dtype, interleaved) -> None:
    x = sample(7, 3, 32, dtype=dtype)
    y = torch_npu.npu_clipped_swiglu(x.npu(), interleaved=interleaved)
    assert (y.dtype, list(y.shape)) == (dtype, [7, 3, 16])
    assert_rounded_once(y, clipped_swiglu(x.double(), interleaved))


@pytest.mark.parametrize("interleaved", [True, False])
def test_clipped_swiglu_clips_by_its_options(interleaved) -> None:
    x = sample(8, 32, dtype=torch.float32)
    options = {"alpha": 1.0, "limit": 2.0, "bias": 0.5}
    y = torch_npu.npu_clipped_swiglu(x.npu(), interleaved=interleaved, **options)
    assert_close(y, clipped_swiglu(x.double(), interleaved, **options), roundings=1)


@pytest.mark.parametrize("interleaved", [True, False])
def test_clipped_swiglu_splits_all_at_and_after_dim(interleaved) -> None:
    """Even and odd elements are those of the merged rows, not of dim."""
    x = sample(3, 4, 5, dtype=torch.float32)
    y = torch_npu.npu_clipped_swiglu(x.npu(), dim=1, interleaved=interleaved)
    assert_rounded_once(y, clipped_swiglu(x.double().view(3, 20), interleaved).view(3, 2, 5))


@pytest.mark.parametrize(("counts", "written"), [([2, 1], 3), ([0, 0], 0), ([4, 9], 6), ([], 0)])
def test_rows_beyond_the_groups_are_left_unwritten(counts, written) -> None:
    x = sample(2, 3, 8, dtype=torch.bfloat16)
    y = torch_npu.npu_clipped_swiglu(x.npu(), group_index=torch.tensor(counts, dtype=torch.int64).npu())
    found, expected = y.cpu().view(6, 4), clipped_swiglu(x.double().view(6, 8), True)
    assert found[written:].isnan().all()
    if written:
        assert_rounded_once(found[:written], expected[:written])


def test_clipped_swiglu_silently_has_no_gradient() -> None:
    """As on the wheel."""
    x = torch.ones(2, 4).npu().requires_grad_()
    torch_npu.npu_clipped_swiglu(x).sum().backward()
    assert x.grad is None


def npu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


HALF, INT = torch.bfloat16, torch.int64
FORWARD = [torch_npu.npu_swiglu, torch_npu.npu_geglu, torch_npu.npu_clipped_swiglu]
BACKWARD = [swiglu_backward, lambda dy, x, **options: geglu_grad(dy, x, dy, **options)]


@pytest.mark.parametrize("call", FORWARD + [lambda x, call=call, **o: call(x, x, **o) for call in BACKWARD])
@pytest.mark.parametrize(
    ("arguments", "options", "rule"),
    [
        ((4, 4), {"dtype": torch.int32}, "int32"),
        ((4, 4), {"dtype": torch.float64}, "float64"),
        ((), {}, r"1 to 8 dimensions, got float32 \[\]"),
        ((2,) * 9, {}, "1 to 8 dimensions"),
        ((4, 4), {"dim": 2}, "dim 2 is out of range"),
        ((4, 4), {"dim": -3}, "dim -3 is out of range"),
        ((4, 5), {}, r"along dim -1 must be even, got float32 \[4, 5\]"),
        ((3, 4), {"dim": 0}, "along dim 0 must be even"),
    ],
)
def test_what_all_of_them_refuse(call, arguments, options, rule) -> None:
    x = npu(*arguments, dtype=options.get("dtype", torch.float32))
    with pytest.raises(RuntimeError, match=f"npu_.*{rule}"):
        call(x, **{key: value for key, value in options.items() if key == "dim"})


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: torch_npu.npu_swiglu(npu(8, 2).t()), r"npu_swiglu: input must be contiguous, got .* \[1, 2\]"),
        (lambda: torch_npu.npu_swiglu(npu(0, 4)), r"npu_swiglu: input is empty: float32 \[0, 4\]"),
        (lambda: swiglu_backward(npu(0, 16), npu(0, 32)), "npu_swiglu_backward: input is empty"),
        (lambda: swiglu_backward(npu(2, 16), npu(2, 32, dtype=HALF)), r"\(float32, bfloat16\)"),
        (lambda: swiglu_backward(npu(2, 32), npu(2, 32)), r"npu_swiglu_backward: grad_output must .* \[2, 16\], got"),
        (lambda: swiglu_backward(npu(2, 24), npu(2, 48)), "multiple of 64 bytes, got 24 elements of 4 bytes, 96 bytes"),
        (
            lambda: swiglu_backward(npu(16, 2, dtype=HALF), npu(32, 2, dtype=HALF), 0),
            "multiple of 64 bytes, .* 32 bytes",
        ),
        (lambda: torch_npu.npu_geglu(npu(2, 4), approximate=2), "npu_geglu: approximate is 2"),
        (lambda: geglu_grad(npu(2, 2), npu(2, 4), npu(2, 2), approximate=-1), "npu_geglu_grad: approximate is -1"),
        (lambda: geglu_grad(npu(2, 2), npu(2, 4), npu(2, 2, dtype=HALF)), r"\(float32, float32, bfloat16\)"),
        (lambda: geglu_grad(npu(2, 1), npu(2, 4), npu(2, 2)), r"npu_geglu_grad: grad_output must .* \[2, 2\]"),
        (lambda: geglu_grad(npu(2, 2), npu(2, 4), npu(2, 4)), r"npu_geglu_grad: gelu must .* \[2, 2\]"),
        (lambda: torch_npu.npu_clipped_swiglu(npu(8, 2).t()), "npu_clipped_swiglu: x must be contiguous"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    with pytest.raises(RuntimeError, match=rule) as error:
        call()
    assert "npu_" in str(error.value)


@pytest.mark.parametrize(
    ("group_index", "rule"),
    [
        (lambda: npu(2, dtype=torch.int32), r"group_index must be int64 and have 1 dimension, got int32 \[2\]"),
        (lambda: npu(1, 2, dtype=INT), r"int64 and have 1 dimension, got int64 \[1, 2\]"),
        (lambda: npu(8193, dtype=INT), "group_index has 8193 elements; the device takes at most 8192"),
        (lambda: npu(4, dtype=INT)[::2], "group_index must be contiguous"),
        (lambda: -npu(2, dtype=INT), "group_index has a negative element"),
    ],
)
def test_group_index_is_a_list_of_at_most_8192_counts(group_index, rule) -> None:
    with pytest.raises(RuntimeError, match=f"npu_clipped_swiglu: .*{rule}"):
        torch_npu.npu_clipped_swiglu(npu(2, 4), group_index=group_index())
    torch_npu.npu_clipped_swiglu(npu(2, 4), group_index=npu(8192, dtype=INT))


def test_halves_that_are_not_aligned_run_forward_and_fail_in_the_backward_pass() -> None:
    x = npu(2, 6).requires_grad_()
    y = torch_npu.npu_swiglu(x)
    with pytest.raises(RuntimeError, match="npu_swiglu_backward: one half along dim -1 must be a multiple of 64 bytes"):
        y.sum().backward()


def test_empty_rows_are_fine_for_geglu_and_clipped_swiglu() -> None:
    assert [t.shape for t in torch_npu.npu_geglu(npu(0, 4))] == [(0, 2), (0, 2)]
    assert torch_npu.npu_clipped_swiglu(npu(0, 4)).shape == (0, 2)
