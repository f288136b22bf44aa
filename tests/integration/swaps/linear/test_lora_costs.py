"""Counted: a training step with adapters of a whole model at its real sizes, with all kernels but that of the loss."""

from collections.abc import Collection

import pytest
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.inspection.counting.counts import Counts
from tests.support.costs import published

KERNELS = {*REPOSITORIES} - {"CrossEntropy"}
TOKENS, RANK = 4096, 16


def step(kernels: Collection[str], dropout: float = 0.0) -> Counts:
    def adapt(model: PreTrainedModel) -> None:
        subject.adapt(model, RANK, dropout)
        kernels_ext_npu.kernelize(model.train())

    kernels_ext_npu.register(kernels=sorted(kernels))
    with published("Qwen3-8B", TOKENS, adapt) as (_, count):
        return count("step")


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
