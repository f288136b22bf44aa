"""Gated linear units: where float16 rounds, what stays unwritten, and limits. Values are cases of test_formulas.py."""

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from tests.softnpu.formula_cases import CASES
from tests.support.rounding import ROUNDING, assert_rounded

swiglu_backward, geglu_grad = torch.ops.npu.npu_swiglu_backward, torch.ops.npu.npu_geglu_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_float16_rounds_between_its_products(dtype) -> None:
    x, dy, gelu = (3 * torch.randn(16, n) for n in (64, 32, 32))
    x, dy, gelu = (t.to(dtype) for t in (x, dy, gelu))
    activated, other = x.chunk(2, -1)
    y, own = (t.cpu() for t in torch_npu.npu_geglu(x.npu(), activate_left=True))
    assert torch.equal(y, other * own) == (dtype != torch.bfloat16)
    found = geglu_grad(dy.npu(), x.npu(), gelu.npu(), activate_left=True).cpu().chunk(2, -1)
    weighted = dy * other if dtype == torch.float16 else dy.double() * other.double()
    leaf = activated.double().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(weighted.double())
    # half the spacing of the smallest numbers, and what float32 leaves of slopes near zero
    limit = ROUNDING[dtype] * leaf.grad.abs() + 2.0**-25 * (dtype == torch.float16) + 2.0**-20 * leaf.grad.abs().max()
    assert ((found[0].double() - leaf.grad).abs() <= limit).all()
    assert torch.equal(found[1], dy * gelu)


@pytest.mark.parametrize(("counts", "written"), [([2, 1], 3), ([0, 0], 0), ([4, 9], 6), ([], 0)])
def test_rows_beyond_the_groups_are_left_unwritten(counts, written) -> None:
    x = (3 * torch.randn(2, 3, 8)).bfloat16()
    y = torch_npu.npu_clipped_swiglu(x.npu(), group_index=torch.tensor(counts, dtype=torch.int64).npu())
    found, expected = y.cpu().view(6, 4), CASES["npu_clipped_swiglu, woven"].formula(x.double().view(6, 8))
    assert found[written:].isnan().all()
    if written:
        assert_rounded(found[:written], expected[:written])


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
