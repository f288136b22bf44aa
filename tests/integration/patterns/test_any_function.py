"""What every function of the kernels does, whatever it computes: on the host, in any layout, and with no wait.

Results and gradients are those of the formula that selftest has of it, in float64, within its tolerance.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import softnpu
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.selftest import comparing, functions
from kernels_ext_npu.selftest.cases import Function
from tests.support.differentiated import kernel

FUNCTIONS = {function.name: function for function in functions.FUNCTIONS if not function.at}
# operators themselves, of one dtype and layout, and what computes nothing elsewhere
OPERATORS = {"GmmFunction", "HybridGmmFunction"}
NPU_ONLY = OPERATORS | {"lora_pair"}
# nodes whose gradients are float32, and what meets masks in it
NODES = {"softmax_top_k", "selective_scan_fn", "linear_recurrence", "chunk_gated_delta_rule", "chunk_kda"}
NO_FLOAT64 = NPU_ONLY | NODES | {"attend_chosen", "attention_mask"}
# what leaves it to torch to say that there are no such integers, or takes them
ANY_DTYPE = OPERATORS | {"top_k_keys", "attend_chosen", "attention_forward", "attention_mask"}
ANY_DTYPE |= {"layer_norm", "add_layer_norm", "causal_conv1d_fn", "causal_conv1d_update", "patch_embedding"}
ANY_DTYPE |= {"linear", "linears", "lora_linear", "lora_linears", "lora_pair", "linear_recurrence"}


def each_function(*but: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in but])


def assert_agrees(function: Function, dtype: torch.dtype = torch.float32, device: str = "npu") -> None:
    difference = function.compare(kernel(function.repository), dtype, device)
    assert difference.largest <= comparing.TOLERANCE[torch.float32]


@each_function(*NPU_ONLY)
def test_on_the_host_it_is_the_same_in_torch(name: str) -> None:
    assert_agrees(FUNCTIONS[name], device="cpu")


@each_function(*NO_FLOAT64)
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


@each_function()
def test_the_host_waits_neither_forward_nor_backward(name: str) -> None:
    function = FUNCTIONS[name]
    given = comparing.moved(function.arguments())
    for _ in range(2):  # a mask or a length that all calls share is made once
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        softnpu.reset_counters()
        results = tensors(function.call(getattr(kernel(function.repository), name), *leaves))
        trained = [y for y in results if y.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(y) for y in trained])
    counters = softnpu.counters()
    assert counters["stream_syncs"] == counters["device_to_host_copies"] == 0


@each_function(*ANY_DTYPE)
def test_integers_are_refused_by_the_name_of_what_has_to_be_floating_point(name: str) -> None:
    function = FUNCTIONS[name]
    first, *others = function.arguments()
    with pytest.raises(TypeError, match=r"floating"):
        function.call(getattr(kernel(function.repository), name), first.long(), *others)
