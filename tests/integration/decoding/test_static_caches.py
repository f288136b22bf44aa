"""Static caches take one token in fewer launches, and hold what transformers' own hold."""

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

import softnpu

ROOM = 6


def tokens(count: int, seed: int) -> Tensor:
    return torch.randn(2, 3, count, 4, generator=torch.Generator().manual_seed(seed))


def layers(windowed: bool) -> list[StaticLayer]:
    made = (StaticSlidingWindowLayer(32, ROOM) if windowed else StaticLayer(32) for _ in range(2))
    return list(made)


@pytest.mark.parametrize(("prompt", "windowed"), [(4, False), (3, True), (9, True), (0, True)])
def test_they_hold_what_they_held(registered: None, prompt: int, windowed: bool) -> None:
    """Windows that become full while tokens come, that are full from the start, and from the first token on."""
    theirs, ours = layers(windowed)
    for number, count in enumerate([*[prompt] * bool(prompt), *[1] * 8, 2, 1]):
        keys, values = tokens(count, number), tokens(count, 100 + number)
        expected = theirs.update(keys, values)
        found = ours.update(keys.npu(), values.npu())
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        assert int(ours.cumulative_length) == int(theirs.cumulative_length)


@pytest.mark.parametrize(("windowed", "prompt", "launches"), [
    (False, 4, {"index_copy_": 2, "add_": 1}),
    (True, 2, {"index_copy_": 2, "add_": 1}),
    (True, 9, {"cat": 2, "copy_": 2}),
])  # fmt: skip
def test_a_token_takes_few_launches_and_nothing_of_the_host(registered, windowed, prompt, launches) -> None:
    _, layer = layers(windowed)
    given = tokens(prompt, 0).npu()
    layer.update(given, given)
    keys, values = tokens(1, 1).npu(), tokens(1, 2).npu()
    softnpu.reset_counters()
    layer.update(keys, values)
    assert softnpu.counters() == launches | {"stream_syncs": 0, "device_to_host_copies": 0}
