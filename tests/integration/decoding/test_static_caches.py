"""Static caches take tokens, and move nothing else of what they hold, which is what transformers' own hold."""

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import StaticIndexedLayer, StaticLayer, StaticSlidingWindowLayer

from kernels_ext_npu.measuring.costs import Cost
from tests.support import npu_counts

ROOM = 6


def tokens(count: int, seed: int, *shape: int) -> Tensor:
    shape = shape or (2, 3, count, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers(windowed: bool) -> list[StaticLayer]:
    made = (StaticSlidingWindowLayer(32, ROOM) if windowed else StaticLayer(32) for _ in range(2))
    return list(made)


@pytest.mark.parametrize(("prompt", "windowed"), [(4, False), (3, True), (9, True), (0, True)])
def test_static_caches_hold_what_those_of_transformers_hold(registered: None, prompt: int, windowed: bool) -> None:
    """Windows become full while tokens come, are full from the start, or from the first token on."""
    theirs, ours = layers(windowed)
    for number, count in enumerate([*[prompt] * bool(prompt), *[1] * 8, 2, 1]):
        keys, values = tokens(count, number), tokens(count, 100 + number)
        expected = theirs.update(keys, values)
        found = ours.update(keys.npu(), values.npu())
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        assert int(ours.cumulative_length) == int(theirs.cumulative_length)


def test_keys_and_values_of_other_sizes_and_strides_and_their_order(registered: None) -> None:
    """Latent attention has one head; states may be a part of what a projection gives, or sequences in turn."""
    theirs, ours = layers(windowed=False)
    for number, count in enumerate((3, 1, 1)):
        states = tokens(count, number, 2, count, 1, 8).transpose(1, 2)
        given = states[..., :5], states[..., 5:]
        expected = theirs.update(*given)
        both = states.npu()
        found = ours.update(both[..., :5], both[..., 5:])
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
        for layer in (theirs, ours):
            layer.reorder_cache(torch.tensor([1, 0]))


def test_static_caches_hold_keys_of_indexers_without_copying_the_cache(registered: None) -> None:
    theirs, ours = StaticIndexedLayer(32), StaticIndexedLayer(32)
    for number, count in enumerate((4, 1, 1, 2, 1)):
        states = tokens(count, number, 2, count, 4)
        with Cost() as cost:
            found = ours.update_indexer(states.npu())
        assert torch.equal(found.cpu(), theirs.update_indexer(states))
        assert "index_copy_" not in cost.launches
        assert int(ours.indexer_cumulative_length) == int(theirs.indexer_cumulative_length)


def test_a_token_that_needs_a_gradient_gets_it(registered: None) -> None:
    _, layer = layers(windowed=False)
    layer.update(tokens(2, 0).npu(), tokens(2, 1).npu())
    states = tokens(1, 2).npu().requires_grad_()
    keys, _ = layer.update(states, tokens(1, 3).npu())
    keys.sum().backward()
    assert torch.equal(states.grad.cpu(), torch.ones(2, 3, 1, 4))


@pytest.mark.parametrize(
    ("windowed", "prompt", "launches"),
    [
        (False, 4, {"scatter_update_": 2, "add_": 1}),
        (True, 2, {"scatter_update_": 2, "add_": 1}),
        (True, 9, {"clone": 2, "copy_": 4}),
    ],
)
def test_a_token_takes_few_launches_and_nothing_of_the_host(registered, windowed, prompt, launches) -> None:
    _, layer = layers(windowed)
    given = tokens(prompt, 0).npu()
    layer.update(given, given)
    keys, values = tokens(1, 1).npu(), tokens(1, 2).npu()
    npu_counts.reset()
    layer.update(keys, values)
    assert npu_counts.read() == launches | {"stream_syncs": 0, "device_to_host_copies": 0}


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_written_is_all_that_moves(registered, count) -> None:
    """On the device, with what operators do inside: tokens, their place and their number, however long the cache is."""
    layer = StaticLayer(4096)
    layer.update(tokens(2, 0).npu(), tokens(2, 1).npu())
    keys, values = tokens(count, 2).npu(), tokens(count, 3).npu()
    with Cost() as cost:
        layer.update(keys, values)
    assert "index_copy_" not in cost.launches
    assert cost.bytes.total() <= 2 * (keys.nbytes + values.nbytes) + 100


@pytest.mark.parametrize("windowed", [False, True])
def test_a_graph_writes_each_token_behind_the_last(registered, windowed) -> None:
    theirs, ours = layers(windowed)
    prompt = tokens(3, 0)
    theirs.update(prompt, prompt)
    ours.update(prompt.npu(), prompt.npu())
    keys, values = tokens(1, 0).npu(), tokens(1, 1).npu()
    graph = torch.npu.NPUGraph()
    with Cost() as cost, torch.npu.graph(graph):
        found = ours.update(keys, values)
    assert cost.launches["npu_scatter_nd_update_"] == 2
    assert "scatter_update_" not in cost.launches
    for number in range(3):
        given = tokens(1, number), tokens(1, 100 + number)
        keys.copy_(given[0])
        values.copy_(given[1])
        graph.replay()
        expected = theirs.update(*given)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
