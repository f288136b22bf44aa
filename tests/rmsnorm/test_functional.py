"""rms_norm and add_rms_norm against float64: values, gradients, launches, limits."""

from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounding import assert_rounded, launched

# of states and of a weight, or of none
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [*product(DTYPES, [*DTYPES, None])]


def exact(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def test_a_zero_row_with_eps_zero_is_not_hidden(kernel: ModuleType) -> None:
    x = torch.zeros(2, 8, device="npu")
    assert kernel.rms_norm(x, torch.ones(8, device="npu"), 0.0).isnan().all()


def test_a_non_contiguous_input_is_not_copied(kernel: ModuleType) -> None:
    x = torch.randn(4, 6, 8, device="npu").transpose(0, 1)
    weight = torch.randn(8, device="npu")
    assert launched(lambda: kernel.rms_norm(x, weight, 1e-6)) == {"npu_rms_norm": 1}
    assert_rounded(kernel.rms_norm(x, weight, 1e-6), exact(x.cpu(), weight.cpu(), 1e-6))


@settings(max_examples=90, deadline=None)
@given(
    shape=st.sampled_from([(5, 123, 123), (7, 256)]) | st.lists(st.integers(1, 7), min_size=2, max_size=5),
    dtypes=st.sampled_from(PAIRS),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    eps=st.sampled_from([0.0, 1e-8, 1e-6, 1e-2]),
)
def test_is_one_launch_with_one_rounding(kernel: ModuleType, shape, dtypes, scale, eps) -> None:
    """A weight of a dtype that the operator does not take beside that of the states is cast before."""
    torch.manual_seed(sum(shape))
    x, weight = (torch.randn(shape) * scale).to(dtypes[0]), dtypes[1] and torch.randn(shape[-1]).to(dtypes[1])
    x[x == 0] = scale  # a row of what float16 rounds to zero would be divided by zero where eps is
    moved = x.npu(), dtypes[1] and weight.npu()
    calls = launched(lambda: kernel.rms_norm(*moved, eps))
    assert calls.pop("npu_rms_norm") == 1
    is_cast = dtypes[1] not in (dtypes[0], torch.float32, None)
    assert is_cast or calls == ({} if dtypes[1] else {"fill_": 1})
    y = kernel.rms_norm(*moved, eps)
    assert y.dtype == x.dtype
    assert_rounded(y, exact(x, weight, eps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_is_one_launch_without_gradients(kernel: ModuleType, dtype) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((3, 5, 64), (3, 5, 64), (64,)))
    moved = [t.to("npu") for t in (x, residual, weight)]
    assert launched(lambda: kernel.add_rms_norm(*moved, 1e-6)) == {"npu_add_rms_norm": 1}
    normed, total = kernel.add_rms_norm(*moved, 1e-6)
    assert torch.equal(total.cpu(), x + residual)
    assert_rounded(normed, exact(x + residual, weight, 1e-6), roundings=2)
    with torch.no_grad():
        leaves = [t.requires_grad_() for t in moved]
        assert launched(lambda: kernel.add_rms_norm(*leaves, 1e-6)) == {"npu_add_rms_norm": 1}


def test_add_of_two_dtypes_takes_the_wider(kernel: ModuleType) -> None:
    x, residual, weight = torch.randn(3, 8).bfloat16(), torch.randn(3, 8), torch.randn(8)
    normed, total = kernel.add_rms_norm(*(t.to("npu") for t in (x, residual, weight)), 1e-6)
    assert normed.dtype == total.dtype == torch.float32
    assert_rounded(normed, exact(x + residual, weight, 1e-6), roundings=2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda k: k.rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6), ValueError, r"weight \[3\].*\[2, 4\]"),
        (lambda k: k.rms_norm(torch.ones(2, 4), torch.ones(2, 4), 1e-6), ValueError, r"weight \[2, 4\]"),
        (lambda k: k.zero_centered_rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6), ValueError, r"weight \[3\]"),
        (lambda k: k.rms_norm(torch.ones(2, 4), torch.ones(4, dtype=torch.int32), 1e-6), TypeError, "int32"),
        (lambda k: k.add_rms_norm(torch.ones(2, 4), torch.ones(4), torch.ones(4), 1e-6), ValueError, r"residual \[4\]"),
        (
            lambda k: k.rms_norm(torch.ones(2, 4, device="npu"), torch.ones(4), 1e-6),
            ValueError,
            "one device, got hidden_states on npu:0, weight on cpu",
        ),
    ],
)
def test_wrong_arguments_are_named(kernel: ModuleType, call, error, words) -> None:
    with pytest.raises(error, match=words):
        call(kernel)
