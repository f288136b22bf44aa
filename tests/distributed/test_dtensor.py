"""DTensors that are handed to the kernels, in every layout."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.functions import FUNCTIONS
from tests.distributed import engines
from tests.distributed.parallel import assert_right, mesh
from tests.support.local_kernels import kernel

pytestmark = pytest.mark.distributed

WHOLE = Replicate()
EVERYWHERE = WHOLE, Shard(0), Shard(1)
# by function of the selftest, of each of its arguments
LAYOUTS: dict[str, list[tuple]] = {
    "rms_norm": [(*EVERYWHERE, Partial()), (WHOLE, Shard(0), Partial())],
    "swiglu": [(*EVERYWHERE, Partial())],
    "geglu": [EVERYWHERE],
    "clipped_swiglu": [EVERYWHERE],
    "apply_rotary_pos_emb": [EVERYWHERE, (WHOLE,), (WHOLE,), (WHOLE,)],
    "softmax_top_k": [EVERYWHERE],
    "fused_experts": [(WHOLE, Shard(0)), (WHOLE,), (WHOLE, Shard(0)), (WHOLE, Shard(0), Shard(1)), (WHOLE, Shard(2))],
}
CASES = {function.name: function for function in FUNCTIONS if function.name in LAYOUTS and not function.at}


def run_function(name: str) -> dict[str, Any]:
    """The differences by layout, relative to what is right."""
    case, differences = CASES[name], {}
    arguments = case.arguments()
    exact = comparing.exact(case.exact, arguments)
    for layout in itertools.product(*LAYOUTS[name]):
        parts = [spread(tensor, placement) for tensor, placement in zip(arguments, layout)]
        outputs = tensors(case.call(getattr(kernel(case.repository), name), *parts))
        ramps = [torch.linspace(-1, 1, y.numel(), device="npu").view(y.shape) for y in outputs]
        torch.autograd.backward(outputs, [distribute_tensor(ramp, mesh(), [WHOLE]) for ramp in ramps])
        gradients = [engines.whole(part.grad) for part in parts if part.requires_grad]
        found = comparing.Results([engines.whole(y) for y in outputs], gradients)
        differences[f"{layout}"] = comparing.difference(found, exact).largest
    return {"differences": differences}


def spread(tensor: Tensor, placement: Any) -> DTensor:
    """A leaf of autograd in a layout."""
    local = tensor.to("npu")
    if placement.is_partial():
        whole = DTensor.from_local(local / 2, mesh(), [placement], run_check=False)
    else:
        whole = distribute_tensor(local, mesh(), [placement])
    return whole.requires_grad_(tensor.is_floating_point())


@pytest.mark.parametrize("name", LAYOUTS)
def test_functions_of_dtensors(two_ranks, name) -> None:
    assert_right(two_ranks.run(run_function, name))


def norm_with_torch() -> dict[str, Any]:
    """The differences of torch's own norm by layout, relative to what float64 gives."""
    case, differences = CASES["rms_norm"], {}
    arguments = case.arguments()[:2]
    norm = lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, 1e-6)  # noqa: E731
    exact = comparing.exact(norm, arguments)
    with engines.registered(True):
        for placement in EVERYWHERE:
            parts = [spread(arguments[0], placement), spread(arguments[1], WHOLE)]
            result = norm(*parts)
            ramp = torch.linspace(-1, 1, result.numel(), device="npu").view(result.shape)
            result.backward(distribute_tensor(ramp, mesh(), [WHOLE]))
            found = comparing.Results([engines.whole(result)], [engines.whole(part.grad) for part in parts])
            differences[f"{placement}"] = comparing.difference(found, exact).largest
    return {"differences": differences}


def test_torchs_own_norm_of_dtensors(two_ranks) -> None:
    assert_right(two_ranks.run(norm_with_torch))


def mix() -> str:
    parts = [tensor.to("npu") for tensor in CASES["fused_experts"].arguments()]
    try:
        kernel("FusedMoE").fused_experts(*parts[:3], *(spread(part, Shard(0)) for part in parts[3:]))
    except TypeError as error:
        return str(error)
    return ""


def test_experts_do_not_guess_what_part_of_a_whole_a_tensor_is(two_ranks) -> None:
    for message in two_ranks.run(mix):
        assert message == (
            "experts take tensors or DTensors, not both, got ['Tensor', 'Tensor', 'Tensor', 'DTensor', 'DTensor']: "
            "distribute all, or call to_local()"
        )
