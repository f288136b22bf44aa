"""Every public way to save and load does with kernels what it does without, and nobody notices it in the live model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import kernels_ext_npu
from tests.support import memory
from tests.support.saving import (  # noqa: F401 each adds its ways
    models,
    of_accelerate,
    of_hub,
    of_peft,
    of_safetensors,
    of_torch,
    of_transformers,
    public_names,
)
from tests.support.saving.ways import WAYS, Loading

pytestmark = [pytest.mark.usefixtures("registered"), pytest.mark.filterwarnings("ignore")]

# names of classes and functions in a pickle of a whole model: which forward it takes, and where it is
WITH_CLASSES = {"torch_whole_model", "pickled"}
NAMES = 1_000  # bytes


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Libraries collect garbage after each file: what is there before is none, and costs a quarter of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def saved(way: str, model: torch.nn.Module, folder: Path) -> tuple[Loading, int, int]:
    """Save a model; say what loads it, the bytes of the files, and those on the device meanwhile."""
    folder.mkdir()
    gc.disable()  # what is freed meanwhile is not what it takes
    try:
        torch.npu.reset_peak_memory_stats()
        before = memory.requested("current")
        load = WAYS[way].save(model, folder)
        taken = memory.requested("peak") - before
    finally:
        gc.enable()
    return load, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), taken


def loaded(load: Loading, kind: str, *, kernels: bool) -> dict[str, torch.Tensor]:
    """Load into a model whose weights are others, with kernels on the NPU or without on the host."""
    fresh = models.make(kind, device="npu" if kernels else "cpu", kernels=kernels, saved=False)
    found = load(fresh)
    return found if isinstance(found, dict) else models.weights(found)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name].cpu(), value)]


@pytest.mark.parametrize(("way", "kind"), [(name, kind) for name, way in WAYS.items() for kind in way.kinds])
def test_it_saves_and_loads_what_it_does_without_kernels(tmp_path: Path, way: str, kind: str) -> None:
    """The files are as large, the device holds no more meanwhile, and the model stays as it was."""
    plain = models.make(kind, device="npu")
    expected = models.weights(plain)
    load_plain, size_plain, taken_plain = saved(way, plain, tmp_path / "plain")
    live = models.make(kind, device="npu", kernels=True)
    held, before = live.state_dict(), (models.logits(live), models.report(live), models.layout(live))
    load, size, taken = saved(way, live, tmp_path / "live")
    assert size <= size_plain + (NAMES if way in WITH_CLASSES else 0)
    assert taken <= taken_plain
    assert torch.equal(models.logits(live), before[0])
    assert (models.report(live), models.layout(live)) == before[1:]
    for each in (load_plain, load):
        for kernels in (False, True):
            assert_equal(loaded(each, kind, kernels=kernels), expected)
    assert_equal(models.weights(live), expected)
    assert all(value.data_ptr() == held[name].data_ptr() for name, value in live.state_dict().items())


def test_models_with_kernels_are_packed_and_transposed() -> None:
    """What the other tests are about."""
    mlp = models.make("dense", device="npu", kernels=True).model.layers[0].mlp
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert gate.data_ptr() + gate.nbytes == up.data_ptr()
    experts = models.make("experts", device="npu", kernels=True).model.layers[0].mlp.experts
    assert all(weight.mT.is_contiguous() and not weight.is_contiguous() for weight in experts.parameters())


def test_every_public_name_is_tried_or_left_out_with_a_reason() -> None:
    tried = {id(public_names.resolve(name)) for way in WAYS.values() for name in way.names}
    exported = public_names.exported()
    left_out = {id(public_names.resolve(name)) for name in public_names.LEFT_OUT}
    assert not tried & left_out
    assert [name for name, value in exported.items() if id(value) not in tried | left_out] == []
