"""Counted: a training step with adapters of a whole model at its real sizes, with all kernels but that of the loss."""

from collections.abc import Collection

import pytest
import torch
from torch._subclasses import FakeTensorMode

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import count
from kernels_ext_npu.measuring import roofline

KERNELS = {*REPOSITORIES} - {"CrossEntropy"}
TOKENS, RANK = 4096, 16


def step(kernels: Collection[str], dropout: float = 0.0) -> Counts:
    values, found = KnownValues(), subject.find("Qwen3-8B")
    kernels_ext_npu.register(kernels=sorted(kernels))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = subject.build(found, torch.bfloat16)
            subject.adapt(model, RANK, dropout)
            kernels_ext_npu.kernelize(model.train())
            inputs = subject.make_inputs(model, 1, TOKENS, values)[0]
            counts = count("step", model, inputs | subject.labels(model, inputs), values, roofline.SOCS["910b"])
    finally:
        kernels_ext_npu.unregister()
    print(f"{counts.launches.total()} launches, {counts.bytes.total() / 1e9:.1f} GB, peak {counts.peak / 1e9:.2f} GB")
    return counts


@pytest.mark.long
def test_a_step_with_adapters_moves_less() -> None:
    """Nothing large is cast, for some launches more, and the layers of one input are one node."""
    counts, before = step(KERNELS), step(KERNELS - {"Linear"})
    assert counts.launches.total() <= 1.5 * before.launches.total()
    assert counts.bytes.total() <= 0.45 * before.bytes.total()
    assert counts.peak <= 0.6 * before.peak


@pytest.mark.long
def test_with_dropout_masks_are_kept_and_not_what_is_left() -> None:
    counts, before = step(KERNELS, dropout=0.05), step(KERNELS - {"Linear"}, dropout=0.05)
    assert counts.bytes.total() <= 0.8 * before.bytes.total()
    assert counts.peak <= 0.7 * before.peak
