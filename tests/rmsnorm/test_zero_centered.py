"""The norm with 1 + weight: one launch in inference, the sum of a norm's weight and its gradient elsewhere."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.rmsnorm import test_functional as functional
from tests.support.rounding import assert_rounded, launched

INFERENCE, TRAINING = "npu_gemma_rms_norm", "npu_rms_norm"


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return functional.exact(x, 1 + weight.double(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 256), (1, 1), (2, 3, 123), (1, 2, 1, 2, 1, 2, 1, 16)])
def test_is_one_launch_with_one_rounding(kernel: ModuleType, shape, dtype) -> None:
    """A weight that the sum would lose in 16 bits, were it rounded."""
    x, weight = torch.randn(shape).to(dtype), (torch.rand(shape[-1]) * 0.004).to(dtype)
    moved = x.npu(), weight.npu()
    assert launched(lambda: kernel.zero_centered_rms_norm(*moved, 1e-6)) == {INFERENCE: 1}
    found = kernel.zero_centered_rms_norm(*moved, 1e-6)
    assert found.dtype == dtype
    assert_rounded(found, exact(x, weight))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(4, 3, 64).transpose(0, 1), torch.randn(64)),
        (torch.randn(3, 64), torch.randn(128)[::2]),
        (torch.randn(3, 64).bfloat16(), torch.randn(64)),
        (torch.randn(3, 64), torch.randn(64).half()),
        (torch.randn(64), torch.randn(64)),
        (torch.randn(0, 64), torch.randn(64)),
    ],
    ids=["turned states", "every other weight", "a wider weight", "a narrower weight", "one dimension", "no rows"],
)
def test_what_its_operator_does_not_take_is_right_too(kernel: ModuleType, x, weight) -> None:
    lies = x.npu().transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x.npu()
    spread = torch.zeros(128, dtype=weight.dtype, device="npu")
    spread[::2] = weight.npu()
    given = lies, spread[::2] if not weight.is_contiguous() else weight.npu()
    assert INFERENCE not in launched(lambda: kernel.zero_centered_rms_norm(*given, 1e-6))
    assert_rounded(kernel.zero_centered_rms_norm(*given, 1e-6), exact(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_takes_it_unless_it_trains(kernel: ModuleType, dtype) -> None:
    """A layer that is checkpointed computes without a gradient first, and has to give the same when it has one."""
    torch._dynamo.reset()
    layer = kernel.layers.RMSNormZeroCentered()
    layer.weight, layer.variance_epsilon = torch.nn.Parameter(torch.randn(64, dtype=dtype).npu()), 1e-6
    x = torch.randn(2, 5, 64, dtype=dtype).npu()
    with torch.no_grad():
        assert TRAINING in launched(lambda: layer(x))
        layer.eval()
        assert launched(lambda: layer(x)) == {INFERENCE: 1}
        compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))
        assert launched(lambda: compiled(x)) == {INFERENCE: 1}
    assert_rounded(layer(x), exact(x.cpu(), layer.weight.detach().cpu()))
