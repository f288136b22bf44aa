"""Operators and their gradients against formulas in float64: one test for all, and what is written where."""

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

from tests.softnpu.formula_cases import CASES, FP16, FULL, HALF, Case, rms
from tests.support.rounding import ROUNDING


def assert_near(found: Tensor, expected: Tensor, case: Case, roundings: int, float32: Tensor | float) -> None:
    """As near as the float64 value rounded once, off by one unit in the last place only next to a tie, or as often."""
    found, expected = found.detach().cpu(), expected.detach()
    size = expected.abs().max() if case.cancels else expected.abs()
    error, best = ((each.double() - expected).abs() for each in (found, expected.to(found.dtype)))
    rounding = best if roundings == 1 and not case.cancels else roundings * ROUNDING[found.dtype] * size
    assert found.shape == expected.shape
    assert (error <= rounding + float32).all(), error.max()


def several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


@pytest.mark.parametrize(("name", "dtypes"), [(name, dtypes) for name, case in CASES.items() for dtypes in case.dtypes])
def test_results_and_gradients_are_those_of_float64(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    case = CASES[name]
    tensors = case.drawn(dtypes)
    leaves = [t.npu().requires_grad_(case.gradients is not None) for t in tensors]
    truth = [t.double().requires_grad_() for t in tensors]
    found, expected = several(case.call(*leaves)), several(case.formula(*truth))
    for one, exact in zip(found, expected):
        assert_near(one, exact, case, case.roundings, case.absolute + 1e-6 * exact.detach().abs())
    if case.gradients is None:
        return
    differentiated = [(found[i], expected[i]) for i in case.of]
    grads = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) for y, _ in differentiated]
    torch.autograd.backward([y for y, _ in differentiated], [grad.npu() for grad in grads])
    torch.autograd.backward([y for _, y in differentiated], [grad.double() for grad in grads])
    for leaf, exact in zip(leaves, truth):
        assert leaf.grad.dtype == leaf.dtype
        assert_near(leaf.grad, exact.grad, case, case.gradients, case.sums * exact.grad.abs().max())


# ---- what is written -------------------------------------------------------------------------------------------------
def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device="npu")


def test_what_was_not_asked_for_is_not_written() -> None:
    x, cos = ones(2, 3, 4, 64), ones(2, 3, 1, 64)
    dx, *of_tables = torch.ops.npu.npu_rotary_mul_backward(x, x, cos, cos)
    assert not dx.isnan().any()
    assert all(t.isnan().all() for t in of_tables)
    assert torch_npu.npu_add_layer_norm(ones(2, 8), ones(2, 8), ones(8), ones(8))[3].isnan().all()


def test_cos_and_sin_of_another_dtype_are_rounded_to_that_of_x() -> None:
    x, cos, sin = torch.randn(4, 2, 16).bfloat16(), torch.randn(4, 1, 16), torch.randn(4, 1, 16)
    y = torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu())
    assert torch.equal(y, torch_npu.npu_rotary_mul(x.npu(), cos.bfloat16().npu(), sin.bfloat16().npu()))


def test_silu_in_place_writes_to_its_argument() -> None:
    x = torch.linspace(-2, 2, 6).view(2, 3).npu()
    view = x.t()
    assert torch_npu.npu_silu_(view) is view
    torch.testing.assert_close(x.cpu(), F.silu(torch.linspace(-2, 2, 6).view(2, 3)))


@pytest.mark.parametrize("columns", [64, 2100])
@pytest.mark.parametrize("dtype", [FULL, HALF, FP16])
def test_the_norm_of_a_sum_is_that_of_the_rounded_sum_but_for_long_rows(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    x1, x2, gamma = (torch.randn(shape).to(dtype) for shape in ((4, columns), (4, columns), (columns,)))
    y, rstd, total = torch_npu.npu_add_rms_norm(x1.npu(), x2.npu(), gamma.npu(), 1e-6)
    assert torch.equal(total.cpu(), x1 + x2)
    is_rounded = dtype == FP16 or columns <= 2000
    exact, expected = rms((x1 + x2).double() if is_rounded else x1.double() + x2.double(), gamma.double())
    limit = (2 * ROUNDING[dtype] + 1e-6) * exact.abs() + 1e-7  # of the norm, and of its product with gamma
    assert ((y.cpu().double() - exact).abs() <= limit).all()
    torch.testing.assert_close(rstd.cpu().double(), expected, rtol=1e-6, atol=0)
    if dtype != FULL:
        wide, narrow, _, total = torch_npu.npu_add_rms_norm_cast(x1.npu(), x2.npu(), gamma.npu())
        assert torch.equal(wide, narrow.float())
        assert torch.equal(total.cpu(), x1 + x2)
        exact, _ = rms((x1 + x2).double() if dtype == FP16 else x1.double() + x2.double(), gamma.double())
        limit = ((2 if dtype == FP16 else 1) * ROUNDING[dtype] + 1e-6) * exact.abs() + 1e-7
        assert ((narrow.cpu().double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("functional", [False, True])
def test_the_second_version_writes_norm_and_sum_over_its_arguments(functional: bool) -> None:
    x1, x2, gamma = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16).npu()
    y, rstd, total = torch_npu.npu_add_rms_norm(x1.npu(), x2.npu(), gamma)
    a, b = x1.npu(), x2.npu()
    if functional:
        found = torch.ops.npu.npu_add_rms_norm_v2_functional(a, b, gamma)
        assert torch.equal(a.cpu(), x1)
    else:
        found = torch.ops.npu.npu_add_rms_norm_v2(a, b, gamma), a, b
    assert all(torch.equal(one, other) for one, other in zip(found, (rstd, y, total)))


def test_the_gradient_of_a_loss_takes_smoothing_and_weights() -> None:
    x, target, weight = torch.randn(6, 11), torch.tensor([3, 0, 10, 4, 4, 1]), torch.rand(11) + 0.1
    leaf = x.double().requires_grad_()
    F.cross_entropy(leaf, target, weight.double(), label_smoothing=0.2, ignore_index=4).backward()
    given = (t.npu() for t in (torch.ones(1), torch.log_softmax(x, -1), target, weight))
    dx = torch.ops.npu.npu_cross_entropy_loss_backward(*given, ignore_index=4, label_smoothing=0.2)
    torch.testing.assert_close(dx.cpu().double(), leaf.grad, rtol=2e-6, atol=2e-6)
