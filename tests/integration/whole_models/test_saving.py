"""Every public way to save and load does with kernels what it does without, and nobody notices it in the live model."""

import gc
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import accelerate
import huggingface_hub
import pytest
import torch
import transformers.utils.hub
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import Trainer, TrainingArguments

import kernels_ext_npu
from tests.support import memory
from tests.support.saving import models, of_files, of_pretrained, of_torch  # noqa: F401 each adds its ways
from tests.support.saving.ways import WAYS

pytestmark = [pytest.mark.usefixtures("registered", "frozen"), pytest.mark.filterwarnings("ignore")]

OFFLOADS = ("cpu_offload", "cpu_offload_with_hook", "disk_offload")
APART = (  # what tests of their own try, and what is no function of Python
    "safetensors.safe_open",
    *(f"accelerate.{name}" for name in OFFLOADS),
    "peft.tuners.lora.LoraModel.merge_adapter",
    "peft.tuners.lora.LoraModel.merge_and_unload",
    "peft.tuners.lora.LoraModel.unload",
    "transformers.PreTrainedModel.get_adapter_state_dict",
    "transformers.PreTrainedModel.load_adapter",
    "transformers.PreTrainedModel.push_to_hub",
)
# names of classes and functions in a pickle of a whole model: which forward it takes, and where it is
WITH_CLASSES = {"torch_whole_model", "pickled"}
NAMES = 1_000  # bytes
SPELLINGS = re.compile(r"(?:^|_)(?:save|load|push|dump|offload|unload|dispatch|state_dict|pretrained|shards)(?:_|$)")
MERGES = re.compile(r"^merge_(?:and_unload|adapter|fsdp_weights)$")

DATA = Path(__file__).resolve().parents[2] / "data"
OWNERS = (DATA / "saving_owners.txt").read_text().split()  # modules and classes
# names, each below the reason for which it is left out
LEFT_OUT = DATA / "saving_left_out.txt"


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


@pytest.mark.parametrize(("way", "kind"), [(name, kind) for name, way in WAYS.items() for kind in way.kinds])
def test_it_saves_and_loads_what_it_does_without_kernels(tmp_path: Path, way: str, kind: str) -> None:
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


def test_models_with_kernels_are_packed_and_transposed() -> None:
    """What the other tests are about."""
    mlp = models.make("dense", device="npu", kernels=True).model.layers[0].mlp
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert gate.data_ptr() + gate.nbytes == up.data_ptr()
    experts = models.make("experts", device="npu", kernels=True).model.layers[0].mlp.experts
    assert all(weight.mT.is_contiguous() and not weight.is_contiguous() for weight in experts.parameters())


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


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The second step from the checkpoint of the first is the second step at once, to the bit.

    Checkpoints of merged experts have the names of the Hub, and transformers' Trainer passes these by when it goes on.
    """
    rows = [{"input_ids": ids, "labels": ids} for ids in models.IDS.repeat(4, 1)]
    trained = {}
    for run, resume in (("at once", None), ("resumed", tmp_path / "at once/checkpoint-1")):
        model = models.make("dense", device="npu", kernels=True, saved=resume is None)
        arguments = TrainingArguments(
            str(tmp_path / run),
            per_device_train_batch_size=2,
            max_steps=2,
            save_steps=1,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=False,
        )
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume and str(resume))
        trained[run] = models.weights(model)
        assert {row.reason for row in kernels_ext_npu.report(model) if row.kind == "gated MLPs"} == {None}
    assert_equal(trained["resumed"], trained["at once"])


@pytest.mark.parametrize("act", ["merge_and_unload", "merge_adapter", "unload"])
def test_a_merged_adapter_is_saved_as_it_is_without_kernels(tmp_path: Path, act: str) -> None:
    """The products of an adapter are the device's in both: equal to the bit."""
    states = []
    for kernels in (False, True):
        model = models.make("adapted", device="npu", kernels=kernels)
        merged = getattr(model, act)() or model.get_base_model()
        merged.save_pretrained(tmp_path / str(kernels))
        states.append(load_file(next((tmp_path / str(kernels)).glob("*.safetensors"))))
    assert_equal(states[1], states[0])


def test_adapters_of_transformers_are_saved_and_loaded(tmp_path: Path) -> None:
    found = []
    for kernels in (False, True):
        model = models.make("dense", device="npu", kernels=kernels)
        model.add_adapter(models.adapter_config())
        model.save_pretrained(tmp_path / str(kernels))
        fresh = models.make("dense", device="npu", kernels=not kernels)
        fresh.load_adapter(tmp_path / str(kernels))
        found += [models.on_host(each.get_adapter_state_dict()) for each in (model, fresh)]
        assert_equal(found[-1], found[-2])
    assert_equal(found[2], found[0])


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_is_pushed_is_what_is_pulled(localhub, monkeypatch, tmp_path: Path, kind: str) -> None:
    template = localhub.url + "/{repo_id}/resolve/{revision}/{filename}"
    values = {"ENDPOINT": localhub.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    for name, value in (values | {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}).items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", localhub.url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # made at the first call, for the Hub of that time
    model = models.make(kind, device="npu", kernels=True)
    model.push_to_hub("somebody/model", token="hf_of_the_tests", max_shard_size="20KB")
    loaded = type(model).from_pretrained("somebody/model", cache_dir=tmp_path / "cache")
    assert_equal(models.weights(loaded), models.weights(model))


def test_transposed_experts_under_two_names_are_refused_or_saved_once_as_ever(tmp_path: Path) -> None:
    model = models.make("experts", device="npu", kernels=True)
    model.again = model.model.layers[0].mlp.experts
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_model(model, str(tmp_path / "model.safetensors"))
    (tmp_path / "hub").mkdir()
    huggingface_hub.save_torch_model(model, tmp_path / "hub")
    accelerate.Accelerator().save_model(model, tmp_path / "accelerate")
    for path in tmp_path.rglob("*.safetensors"):
        kept = [name for name in load_file(path) if name.endswith("down_proj")]
        assert len(kept) == 1, path
    fresh = models.make("experts", device="npu", kernels=True, saved=False)
    fresh.again = fresh.model.layers[0].mlp.experts
    load_model(fresh, tmp_path / "model.safetensors")
    assert_equal(models.weights(fresh), models.weights(model))


# ---- the public names under which what is installed saves and loads --------------------------------------------------
def resolve(path: str) -> Any:
    """Return what a public name is; a method as the function that it is."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return getattr(found, "__func__", found)
    raise ImportError(path)


def exported() -> dict[str, Any]:
    """Return everything that the installed libraries offer under such a name, each once, by the first of its names."""
    found: dict[int, tuple[str, Any]] = {}
    for path in OWNERS:
        owner = resolve(path)
        library = path.partition(".")[0]
        for name in dir(owner):
            if name.startswith("_") or not (SPELLINGS.search(name) or MERGES.search(name)):
                continue
            value = resolve(f"{path}.{name}")
            if callable(value) and (getattr(value, "__module__", None) or "").startswith(library):
                found.setdefault(id(value), (f"{path}.{name}", value))
    return dict(found.values())


@pytest.mark.long
def test_every_public_name_is_called_by_a_way_or_left_out_with_a_reason(tmp_path: Path) -> None:
    """Of models on the host without kernels, which are what a way goes through with them."""
    called = set()
    for name in WAYS.keys() - WITH_CLASSES:
        kind, folder = WAYS[name].kinds[0], tmp_path / name
        model, fresh = models.make(kind), models.make(kind, saved=False)
        folder.mkdir()
        sys.setprofile(lambda frame, event, argument: called.add(frame.f_code) if event == "call" else None)
        try:
            WAYS[name].save(model, folder)
            WAYS[name].load(fresh, folder)
        finally:
            sys.setprofile(None)
    tried = {name for name, value in exported().items() if code_of(value) in called}
    left_out = [line.strip() for line in LEFT_OUT.read_text().splitlines() if line.startswith(" ")]
    assert not tried & set(left_out)
    known = {id(resolve(name)) for name in (*left_out, *APART)}
    assert [name for name, value in exported().items() if name not in tried and id(value) not in known] == []


def code_of(function: Any) -> Any:
    """Return the code of a function below what decorates it, since one decorator has one code for all."""
    return getattr(inspect.unwrap(function), "__code__", None)
