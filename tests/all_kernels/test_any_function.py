"""What every function of the kernels does, whatever it computes: where it is called, in any layout, and with no wait.

Results and gradients are those of the formula that selftest has of it, in float64, within its tolerance.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.selftest import comparing, functions
from kernels_ext_npu.selftest.cases import Function
from tests.support import npu_counts
from tests.support.local_kernels import kernel

FUNCTIONS = {function.name: function for function in functions.FUNCTIONS if not function.at}
# operators themselves, of one dtype and layout, and what computes nothing elsewhere
OPERATORS = {"GmmFunction", "HybridGmmFunction"}
NPU_ONLY = OPERATORS | {"lora_pair"}
# what leaves it to torch to say what it multiplies
PRODUCTS = OPERATORS | {"lora_pair", "patch_embedding"}
# whose integers meet something else before them: a product with a mask, the sigmoid of a decay
ANY_DTYPE = PRODUCTS | {"attention_mask", "linear_recurrence"}
# nodes that write into what they have, or launch what torch has no rule for, and have no formula that fits into memory
ONE_AT_A_TIME = {
    *("attend_chosen", "indexer_loss", "chunk_gated_delta_rule", "chunk_kda", "linear_recurrence", "selective_scan_fn"),
    *("lora_linear", "lora_linears", "lora_pair"),
}
ANY_DEVICE = PRODUCTS | {"lora_linear", "lora_linears", "attention_mask", "top_k_keys", "attend_chosen", "indexer_loss"}


def each_function(*but: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in but])


def assert_agrees(function: Function, dtype: torch.dtype = torch.float32, device: str = "npu") -> None:
    difference = function.compare(kernel(function.repository), dtype, device)
    assert difference.largest <= comparing.TOLERANCE[torch.float32]


@each_function(*NPU_ONLY)
def test_on_the_host_it_is_the_same_in_torch(name: str) -> None:
    assert_agrees(FUNCTIONS[name], device="cpu")


@each_function(*NPU_ONLY, "attention_mask")
def test_float64_is_taken(name: str) -> None:
    """To float32, in which operators of the device compute."""
    assert_agrees(FUNCTIONS[name], torch.float64)


def turned(x: Tensor) -> Tensor:
    """The same values, with the dimensions in memory in the opposite order."""
    order = range(x.dim() - 1, -1, -1)
    return x.permute(*order).contiguous().permute(*order)


@each_function(*OPERATORS)
def test_tensors_may_lie_in_any_order(name: str) -> None:
    function = FUNCTIONS[name]
    assert_agrees(replace(function, call=lambda f, *given: function.call(f, *map(turned, given))))


@each_function(*OPERATORS)
def test_checkpoints_compute_it_again(name: str) -> None:
    function = FUNCTIONS[name]
    assert_agrees(replace(function, call=lambda f, *given: checkpoint(function.call, f, *given, use_reentrant=False)))


@each_function()
def test_results_may_be_written_to(name: str) -> None:
    """What autograd lets nobody write to is a view that a node of ours gives."""
    function = FUNCTIONS[name]
    leaves = [t.npu().requires_grad_(t.is_floating_point()) for t in function.arguments()]
    for y in tensors(function.call(getattr(kernel(function.repository), name), *leaves)):
        y.mul_(1)


@each_function()
def test_each_argument_may_be_the_only_one_with_a_gradient(name: str) -> None:
    function = FUNCTIONS[name]
    call, given = partial(function.call, getattr(kernel(function.repository), name)), function.arguments()
    expected = comparing.results(call, comparing.moved(given)).gradients
    for i, gradient in zip([i for i, t in enumerate(given) if t.is_floating_point()], expected):
        leaves = [t.npu().requires_grad_(j == i) for j, t in enumerate(given)]
        trained = [y for y in tensors(call(*leaves)) if y.requires_grad]
        torch.autograd.backward(trained, [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y) for y in trained])
        torch.testing.assert_close(leaves[i].grad, gradient)


@each_function()
def test_a_backward_of_several_gradients_is_that_of_each_or_refused(name: str) -> None:
    function = FUNCTIONS[name]

    def gradients(call: Callable, given: Sequence[Tensor]) -> Sequence[Tensor]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        trained = [y for y in tensors(call(*leaves)) if y.requires_grad]
        ramps = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y) for y in trained]
        both = [torch.stack((ramp, ramp.flip(-1))) for ramp in ramps]
        wanted = [t for t in leaves if t.requires_grad]
        return torch.autograd.grad(trained, wanted, both, is_grads_batched=True, materialize_grads=True)

    ours = partial(function.call, getattr(kernel(function.repository), name))
    if name in ONE_AT_A_TIME:
        with pytest.raises(NotImplementedError, match="one gradient at a time"):
            gradients(ours, comparing.moved(function.arguments()))
        return
    found = gradients(ours, comparing.moved(function.arguments()))
    with comparing.InPlaceOfFloat32(torch.float64):
        expected = gradients(function.exact, comparing.doubled(function.arguments()))
    for a, b in zip(found, expected, strict=True):
        assert (a.cpu().double() - b).norm() <= comparing.TOLERANCE[torch.float32] * b.norm()


@each_function(*NPU_ONLY)
def test_on_the_meta_device_results_have_their_shapes(name: str) -> None:
    function = FUNCTIONS[name]
    call, given = partial(function.call, getattr(kernel(function.repository), name)), function.arguments()
    there, here = (tensors(call(*comparing.moved(given, device))) for device in ("meta", "npu"))
    assert [(y.shape, y.dtype) for y in there] == [(y.shape, y.dtype) for y in here]


@each_function()
def test_the_host_waits_neither_forward_nor_backward(name: str) -> None:
    function = FUNCTIONS[name]
    given = comparing.moved(function.arguments())
    for _ in range(2):  # a mask or a length that all calls share is made once
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        npu_counts.reset()
        results = tensors(function.call(getattr(kernel(function.repository), name), *leaves))
        trained = [y for y in results if y.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(y) for y in trained])
    counters = npu_counts.read()
    assert counters["stream_syncs"] == counters["device_to_host_copies"] == 0


@each_function(*ANY_DTYPE)
def test_integers_are_refused_by_the_name_of_what_has_to_be_floating_point(name: str) -> None:
    function = FUNCTIONS[name]
    first, *others = function.arguments()
    with pytest.raises(TypeError, match=r"floating"):
        function.call(getattr(kernel(function.repository), name), first.long(), *others)


@each_function(*ANY_DEVICE)
def test_tensors_on_several_devices_are_refused(name: str) -> None:
    function = FUNCTIONS[name]
    *others, last = function.arguments()
    if others:
        with pytest.raises(ValueError, match=r"device|must be on"):
            function.call(getattr(kernel(function.repository), name), *comparing.moved(others), last)
