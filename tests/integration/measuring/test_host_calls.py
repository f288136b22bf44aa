"""What our forwards ask of the host, beside LLaMA-Factory's and transformers' own: calls of Python, of C, and of torch.

`make benchmark` measures how long that takes on a machine, and asserts nothing.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

import kernels_ext_npu
from tests.support.forwards import Compared, compared
from tests.support.host_calls import HostCalls, host_calls

# What ours asks more than LLaMA-Factory's: in inference, and in training, forward and backward. A function around each
# layer asks whether the class of its module computes what was matched. Whether an operator takes a tensor, and whether
# weights lie side by side, is looked at each time, in Python and by methods of C; so is the shape of a norm's weight,
# of which the operator takes a larger one, silently, for the norm over several dimensions. Of torch ours asks no more,
# but for RoPE: views that save copies of q and k on the device; and three operators less for a zero-centred norm in
# inference, whose operator adds the one itself, once it is known that it takes the tensors. A gated norm is a node of
# autograd, which Python answers, and whose backward looks whether it gets several gradients at once; of 16 bits it asks
# torch for half of what theirs does.
MORE = {
    "RMSNorm": (HostCalls(4, 4, 0), HostCalls(4, 4, 0)),
    "RMSNorm, zero-centred": (HostCalls(4, 8, -3), HostCalls(3, 4, 0)),  # its class has a method, which is asked for
    "RMSNorm, gated": (HostCalls(15, 23, 0), HostCalls(34, 39, 0)),
    "SwiGLU MLP": (HostCalls(10, 30, 0), HostCalls(39, 79, 0)),
    "RoPE": (HostCalls(7, 8, 2), HostCalls(28, 33, 7)),
    "FusedMoE experts": (HostCalls(12, 42, 0), HostCalls(47, 83, 0)),
}
SIDES = ("ours", "LLaMA-Factory's", "transformers'")


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def forwards(request: pytest.FixtureRequest) -> dict[str, Compared]:
    kernels_ext_npu.register()
    return compared(request.param)


def counts(case: Compared, training: bool) -> list[HostCalls]:
    steps, prepare = case.steps(training)
    with torch.set_grad_enabled(training):
        return [host_calls(step, prepare) for step in steps]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MORE)
def test_a_forward_asks_for_no_more_calls(forwards, name: str, training: bool) -> None:
    ours, theirs, original = asked = counts(forwards[name], training)
    assert counts(forwards[name], training) == asked  # whatever the machine does besides
    for side, calls in zip(SIDES, asked):
        print(f"{name}, {'training' if training else 'inference'}, {side}: {calls}")
    more = MORE[name][training]
    assert ours.torch <= theirs.torch + more.torch
    assert ours.python <= theirs.python + more.python
    assert ours.c <= theirs.c + more.c
    assert ours.torch <= original.torch


def test_every_kind_of_call_is_counted_once() -> None:
    def inner() -> int:
        return len("ab")

    def call() -> None:
        inner()
        x.shape  # noqa: B018
        (x * 2).view(-1)
        torch.ops.npu.npu_swiglu(x, -1)

    x = torch.ones(2, 2, device="npu")
    # call, inner and torch.ops; len, view, the attribute and what torch.ops calls; a product, a view and an operator,
    # whose formula on the software device is made of calls of Python and of operators
    assert host_calls(call) == HostCalls(python=3, c=4, torch=3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


def test_python_in_a_backward_is_counted() -> None:
    """Also where it runs in one of the engine's threads by default."""
    x = torch.ones(2, device="npu", requires_grad=True)
    calls = [host_calls(partial(torch.autograd.grad, y, x, x, retain_graph=True)) for y in (Doubled.apply(x), x * 2)]
    assert calls[0].python > calls[1].python
