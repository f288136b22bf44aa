"""Tell whether a result is what its formula gives in float64, rounded once; and count what is launched for it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.support import npu_counts

# half a unit in the last place of the result; the device computes float64 in float32
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-24}
FLOAT32 = 1e-6  # of sums of a few hundred products of numbers of size one, in float32


def assert_rounded(found: Tensor, expected: Tensor, roundings: int = 1) -> None:
    error = (found.detach().cpu().double() - expected).abs()
    limit = roundings * ROUNDING[found.dtype] * expected.abs() + FLOAT32 * expected.abs().clamp(min=1)
    assert (error <= limit).all(), (error - limit).max()


def launched(function: Callable[[], object]) -> dict[str, int]:
    """Call something, and return how often it launches each operator."""
    npu_counts.reset()
    function()
    return {name: count for name, count in npu_counts.read().items() if count}


def assert_float64s(
    ours: Callable[..., Tensor], formula: Callable[..., Tensor], tensors: Sequence[Tensor], tolerance: float
) -> None:
    """Compare a result, and the gradients of all that it is made of, with those of a formula in float64 on the CPU.

    The tensors are of one dtype, which results and gradients have to have; the tolerance is relative to their norms.
    """
    leaves, truth = ([move(t.detach()).requires_grad_() for t in tensors] for move in (Tensor.npu, Tensor.double))
    y, expected = ours(*leaves), formula(*truth)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    y.backward(grad.npu())
    expected.backward(grad.double())
    for found, wanted in ((y, expected), *((a.grad, b.grad) for a, b in zip(leaves, truth))):
        assert (found.dtype, found.shape) == (tensors[0].dtype, wanted.shape)
        assert (found.detach().cpu().double() - wanted.detach()).norm() <= tolerance * wanted.norm()
