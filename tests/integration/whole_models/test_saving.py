"""Every way to save and load does with kernels what it does without, and nobody notices it in the live model."""

import gc
from pathlib import Path

import accelerate
import pytest
import torch
from safetensors.torch import load_file

from tests.integration.whole_models.saving import file_ways, models, pretrained_ways, torch_ways
from tests.support import memory

pytestmark = [pytest.mark.usefixtures("registered", "frozen"), pytest.mark.filterwarnings("ignore")]

WAYS = torch_ways.WAYS | file_ways.WAYS | pretrained_ways.WAYS
OFFLOADS = ("cpu_offload", "cpu_offload_with_hook", "disk_offload")
# names of classes and functions in a pickle of a whole model: which forward it takes, and where it is
WITH_CLASSES = {"torch_whole_model", "pickled"}
NAMES = 1_000  # bytes


def saved(way: str, model: torch.nn.Module, folder: Path) -> tuple[int, int]:
    """Save a model; say the bytes of the files, and those on the device meanwhile."""
    folder.mkdir()
    gc.disable()  # what is freed meanwhile is not what it takes
    try:
        torch.npu.reset_peak_memory_stats()
        before = memory.requested("current")
        WAYS[way].save(model, folder)
        taken = memory.requested("peak") - before
    finally:
        gc.enable()
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), taken


def loaded(way: str, folder: Path, kind: str, *, kernels: bool) -> dict[str, torch.Tensor]:
    """Load into a model whose weights are others, with kernels on the NPU or without on the host."""
    fresh = models.make(kind, device="npu" if kernels else "cpu", kernels=kernels, saved=False)
    found = WAYS[way].load(fresh, folder)
    return found if isinstance(found, dict) else models.weights(found if isinstance(found, torch.nn.Module) else fresh)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name].cpu(), value)]


def test_models_with_kernels_are_packed() -> None:
    """What the other tests are about."""
    mlp = models.make("dense", device="npu", kernels=True).model.layers[0].mlp
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert gate.data_ptr() + gate.nbytes == up.data_ptr()


@pytest.mark.parametrize(("way", "kind"), [(name, kind) for name, way in WAYS.items() for kind in way.kinds])
def test_a_model_saves_and_loads_with_kernels_what_it_does_without(tmp_path: Path, way: str, kind: str) -> None:
    """The files are as large, the device holds no more meanwhile, and the model stays as it was."""
    live = models.make(kind, device="npu", kernels=True)  # until then `kernels` lets no model be pickled as a whole
    plain = models.make(kind, device="npu")
    expected = models.weights(plain)
    size_plain, taken_plain = saved(way, plain, tmp_path / "plain")
    held, before = live.state_dict(), (models.logits(live), models.report(live), models.layout(live))
    size, taken = saved(way, live, tmp_path / "live")
    assert size <= size_plain + (NAMES if way in WITH_CLASSES else 0)
    assert taken <= taken_plain
    assert torch.equal(models.logits(live), before[0])
    assert (models.report(live), models.layout(live)) == before[1:]
    for folder in ("plain", "live"):
        for kernels in (False, True):
            assert_equal(loaded(way, tmp_path / folder, kind, kernels=kernels), expected)
    assert_equal(models.weights(live), expected)
    assert all(value.data_ptr() == held[name].data_ptr() for name, value in live.state_dict().items())


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_model_that_was_offloaded_is_saved_as_it_was(tmp_path: Path, offload: str, kind: str) -> None:
    model = models.make(kind, device="npu", kernels=True)
    expected, logits = models.weights(model), models.logits(model)
    if offload == "disk_offload":
        accelerate.disk_offload(model, tmp_path / "offloaded")
    elif offload == "cpu_offload":
        accelerate.cpu_offload(model)
    else:
        model, _ = accelerate.cpu_offload_with_hook(model, "npu")
    accelerate.Accelerator().save_model(model, tmp_path / "saved")
    assert_equal(load_file(tmp_path / "saved/model.safetensors"), expected)
    with torch.no_grad():
        found = model(models.IDS.npu(), use_cache=False).logits.cpu()
    assert (found - logits).norm() <= 1e-6 * logits.norm()  # float32 sums in another order


@pytest.mark.parametrize("device_map", ["npu", "auto", "offloaded"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_was_saved_is_loaded_wherever_it_is_asked_for(tmp_path: Path, kind: str, device_map: str) -> None:
    live = models.make(kind, device="npu", kernels=True)
    live.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    parts = {f"model.{name}": 0 for name in ("embed_tokens", "norm", "rotary_emb")} | {"lm_head": 0}
    options = {"device_map": parts | {"model.layers": "disk"} if device_map == "offloaded" else device_map}
    for kernels in (False, True):
        folder = tmp_path / f"offload {kernels}"
        loaded = type(live).from_pretrained(tmp_path / "saved", use_kernels=kernels, offload_folder=folder, **options)
        assert (models.logits(loaded) - models.logits(live)).norm() <= 1e-6 * models.logits(live).norm()
        loaded.save_pretrained(tmp_path / f"again {kernels}", save_original_format=False)
        assert_equal(load_file(tmp_path / f"again {kernels}/model.safetensors"), models.weights(live))
