"""DTensors that are handed to the kernels, in every layout."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.functions.norms import gated, gelu_tanh
from kernels_ext_npu.selftest.functions.rotary import rotated
from tests.distributed.modules import normal
from tests.distributed.parallel import assert_right, largest_difference, mesh
from tests.support.differentiated import INDEX, LIMIT, clipped, experts, kernel

pytestmark = pytest.mark.distributed

WHOLE = Replicate()


def fused_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return kernel("FusedMoE").fused_experts(x, index, weights, gate_up, down)


def inputs(*shapes: tuple[int, ...], scale: float = 1.0) -> list[Tensor]:
    return [(scale * normal(*shape, seed=seed)).detach().requires_grad_() for seed, shape in enumerate(shapes)]


EXPERTS = [normal(4, 16), INDEX[:4], *inputs((4, 2), (4, 32, 16), (4, 16, 16), scale=0.2)]
ROWS, HALVES = inputs((2, 4, 16)), inputs((2, 4, 16), (2, 4, 16))
TABLES = [t.detach() for t in inputs((2, 6, 8), (2, 6, 8))]
EVERYWHERE, DIVIDED = (WHOLE, Shard(0), Shard(2)), [(WHOLE, Shard(2)), (WHOLE, Shard(2))]
# what is called, its formula, the tensors of both, and the layouts of each
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor], list[tuple]]] = {
    "rms_norm": (
        lambda x, weight: kernel("RMSNorm").rms_norm(x, weight, 1e-6),
        lambda x, weight: F.rms_norm(x, (8,), weight, 1e-6),
        inputs((2, 4, 8), (8,)),
        [(*EVERYWHERE, Shard(1), Partial()), (WHOLE, Shard(0), Partial())],
    ),
    "swiglu": (lambda x: kernel("SwiGLU").swiglu(x), gated(F.silu), ROWS, [(*EVERYWHERE, Partial())]),
    "swiglu of two": (lambda a, b: kernel("SwiGLU").swiglu(a, b), lambda a, b: F.silu(a) * b, HALVES, DIVIDED),
    "geglu": (lambda x: kernel("SwiGLU").geglu(x), gated(gelu_tanh), ROWS, [EVERYWHERE]),
    "geglu of two": (lambda a, b: kernel("SwiGLU").geglu(a, b), lambda a, b: gelu_tanh(a) * b, HALVES, DIVIDED),
    "clipped_swiglu": (
        lambda x: kernel("SwiGLU").clipped_swiglu(x, limit=LIMIT, interleaved=False),
        partial(clipped, interleaved=False),
        ROWS,
        [EVERYWHERE],
    ),
    "apply_rotary_pos_emb": (
        lambda *tensors: sum(kernel("RoPE").apply_rotary_pos_emb(*tensors)),
        lambda q, k, *tables: sum(rotated(x, *(t.unsqueeze(1) for t in tables)) for x in (q, k)),
        [*inputs((2, 4, 6, 8), (2, 4, 6, 8)), *TABLES],
        [(WHOLE, Shard(0), Shard(1)), (WHOLE,), (WHOLE,), (WHOLE,)],
    ),
    "softmax_top_k": (
        lambda logits: kernel("FusedMoE").softmax_top_k(logits, 2)[0],
        lambda logits: F.normalize(logits.softmax(-1).topk(2).values, p=1, dim=-1),
        inputs((6, 4)),
        [(WHOLE, Shard(0), Shard(1))],
    ),
    "fused_experts": (
        fused_experts, lambda x, _, *others: experts(x, *others), EXPERTS,
        [(WHOLE, Shard(0)), (WHOLE,), (WHOLE, Shard(0)), (WHOLE, Shard(0), Shard(1)), (WHOLE, Shard(2))],
    ),
}  # fmt: skip


def run_function(name: str) -> dict[str, Any]:
    """The differences by layout."""
    function, formula, tensors, layouts = FUNCTIONS[name]
    truth = [t.detach().double().requires_grad_() if t.requires_grad else t for t in tensors]
    expected = formula(*truth)
    gradient = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    expected.backward(gradient.double())
    differences = {}
    for layout in itertools.product(*layouts):
        parts = [spread(tensor, placement) for tensor, placement in zip(tensors, layout)]
        y = function(*parts)
        y.backward(distribute_tensor(gradient.to("npu"), mesh(), [WHOLE]))
        differences[f"{layout}"] = largest_difference(y, expected)
        for index, (part, exact) in enumerate(zip(parts, truth)):
            if exact.requires_grad:
                differences[f"{layout}, gradient {index}"] = largest_difference(part.grad, exact.grad)
    return {"differences": differences}


def spread(tensor: Tensor, placement: Any) -> DTensor:
    """A leaf of autograd in a layout."""
    local = tensor.detach().to("npu")
    if placement.is_partial():
        share = local / 2
        return DTensor.from_local(share, mesh(), [placement], run_check=False).requires_grad_(tensor.requires_grad)
    return distribute_tensor(local, mesh(), [placement]).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_dtensors(two_ranks, name) -> None:
    assert_right(two_ranks.run(run_function, name))


def mix() -> str:
    parts = [t.detach().to("npu") for t in EXPERTS]
    try:
        fused_experts(*parts[:3], *(distribute_tensor(part, mesh(), [Shard(0)]) for part in parts[3:]))
    except TypeError as error:
        return str(error)
    return ""


def test_experts_do_not_guess_what_part_of_a_whole_a_tensor_is(two_ranks) -> None:
    for message in two_ranks.run(mix):
        assert message == (
            "experts take tensors or DTensors, not both, got ['Tensor', 'Tensor', 'Tensor', 'DTensor', 'DTensor']: "
            "distribute all, or call to_local()"
        )
