"""How many operators a vision tower, an encoder and CLIP launch, with the kernels of their layers and without."""

from __future__ import annotations

import pytest
import torch

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import LAYERS
from tests.support import zoo

KERNELS = ["Activation", "RMSNorm", "RoPE", "SwiGLU"]
# small models, in eager attention: forward, and forward with backward
COUNTS = {
    "qwen2_5_vl": ((375, 778), (277, 463)),
    "bert": ((62, 148), (58, 144)),
    "clip": ((116, 373), (108, 349)),
}


def counted(name: str, is_swapped: bool) -> tuple[tuple[int, int], int]:
    """Launches of a forward, and of one with its backward, and how often the host waited."""
    model = zoo.build(name).to("npu")
    model.set_attn_implementation("eager")
    if is_swapped:
        kernels_ext_npu.kernelize(model)
    inputs = {key: value.to("npu") for key, value in zoo.inputs(name, model).items()}
    with torch.no_grad():
        model(**inputs)  # what is done once
    found = []
    waits = 0
    for trains in (False, True):
        softnpu.reset_counters()
        with torch.set_grad_enabled(trains):
            loss = zoo.loss(model(**inputs)) if trains else model(**inputs)
            if trains:
                loss.backward()
        calls = softnpu.counters()
        waits += calls.pop("stream_syncs", 0)
        calls.pop("device_to_host_copies", 0)
        found.append(sum(calls.values()))
    return (found[0], found[1]), waits


@pytest.mark.parametrize("name", COUNTS)
def test_launches_before_and_after(name: str) -> None:
    assert set(KERNELS) <= set(LAYERS.values())
    before, waited = counted(name, is_swapped=False)
    kernels_ext_npu.register(kernels=KERNELS)
    try:
        after, waits = counted(name, is_swapped=True)
    finally:
        kernels_ext_npu.unregister()
    assert (before, after) == COUNTS[name]
    assert waits == waited
