"""Packed sequences as whole graphs under torch.compile, forward and backward, and masks in them."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers.masking_utils import bidirectional_mask_function

from tests.support import npu_counts
from tests.support.attention_models import on_npu

SINKS = torch.randn(4, generator=torch.Generator().manual_seed(3))


def test_a_graph_of_a_mask_serves_any_number_of_queries(kernel: ModuleType) -> None:
    """Among as many keys, too: then a length is no constant of the graph."""
    torch.compiler.reset()
    padding, graphs = torch.tensor([[1] * 7, [1] * 4 + [0] * 3], device="npu").bool(), CompileCounter()

    def make_mask(x: Tensor) -> Tensor:
        return kernel.attention_mask(
            2, x.shape[1], 7, mask_function=bidirectional_mask_function, attention_mask=padding
        ).clone()

    compiled = torch.compile(make_mask, fullgraph=True, backend=graphs, dynamic=True)
    for queries in (5, 3, 7):
        found = compiled(torch.ones(2, queries, device="npu"))
        assert torch.equal(found, padding[:, None, None].expand(-1, -1, queries, -1))
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, [5, 0, 6, 1]),
        ({"causal": True}, [5, 0, 3]),  # four tokens are in no sequence
        ({"window_size": (2, 1), "s_aux": SINKS}, [7, 5]),
    ],
)
def test_packed_sequences_are_one_graph_in_which_the_host_waits_once(kernel: ModuleType, options, lengths) -> None:
    """However many layers there are; the graph is that of other lengths, too."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    options = on_npu(options)
    q, k, v = (torch.randn(12, n, 16, device="npu") for n in (4, 2, 2))

    def layers(ends: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        first = kernel.flash_attn_varlen_func(*tensors, ends, ends, **options)
        return kernel.flash_attn_varlen_func(first, *tensors[1:], ends, ends, **options)

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for number in (lengths, lengths[::-1]):
        ends = torch.tensor([0, *number]).cumsum(0).int()
        in_graph, eager = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
        given = ends.npu()
        npu_counts.reset()
        found = compiled(given, *in_graph)
        assert npu_counts.read()["stream_syncs"] == 1
        assert npu_counts.read()["npu_fusion_attention_v3"] == 2
        expected = layers(ends.tolist(), *eager)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(found, expected)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(in_graph, eager))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_of_sinks_in_a_graph_is_the_eager_one(kernel: ModuleType, packed, deterministic) -> None:
    torch.compiler.reset()
    q, k, v = (torch.randn(12, n, 64, device="npu").bfloat16() for n in (4, 2, 2))
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device="npu")

    def layer(sinks: Tensor, ends: Tensor, *tensors: Tensor) -> Tensor:
        if packed:
            return kernel.flash_attn_varlen_func(*tensors, ends, ends, causal=True, s_aux=sinks)
        return kernel.flash_attn_func(*(t.unsqueeze(0) for t in tensors), causal=True, s_aux=sinks)

    grads = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            leaves = [t.clone().requires_grad_() for t in (SINKS.npu(), q, k, v)]
            function(leaves[0], ends, *leaves[1:]).square().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(*grads))
    assert bool(grads[0][0].any())


def test_a_graph_says_which_lengths_do_not_fit_when_it_runs(kernel: ModuleType) -> None:
    torch.compiler.reset()
    q = torch.randn(4, 2, 16, device="npu")
    compiled = torch.compile(
        lambda ends: kernel.flash_attn_varlen_func(q, q, q, ends, ends), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match="lengths must ascend from 0 to at most 4, got 0, 3, 2"):
        compiled(torch.tensor([0, 3, 2], device="npu"))


def test_lengths_of_keys_of_their_own_end_a_graph(kernel: ModuleType) -> None:
    """A sequence of them may have more queries than keys, of which the operator takes none that sees no key."""
    torch.compiler.reset()
    q, k = torch.randn(6, 2, 16, device="npu"), torch.randn(7, 2, 16, device="npu")
    ends, key_ends = torch.tensor([0, 4, 6], device="npu"), torch.tensor([0, 2, 7], device="npu")
    compiled = torch.compile(kernel.flash_attn_varlen_func, backend="aot_eager")
    found = compiled(q, k, k, ends, key_ends, causal=True)
    assert torch.equal(found, kernel.flash_attn_varlen_func(q, k, k, [0, 4, 6], [0, 2, 7], causal=True))
    assert not found[:2].any()
