"""register, kernelize, restore, unregister: what they change, and that nothing else changes."""

from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import utils as distributed
from transformers.integrations import hub_kernels
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm

import kernels_ext_npu
from kernels_ext_npu import catalogue
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.distribution import sources
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS

ROOT = Path(__file__).resolve().parents[3]


def load(folder: Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map="npu", use_kernels=True, **options)


def counts(model) -> tuple[int, int]:
    rows = [row for row in kernels_ext_npu.report(model) if row.kind == "norms"]
    return sum(row.swapped for row in rows), len(rows)


def test_other_devices_keep_the_kernels_they_had(registered, checkpoint) -> None:
    table = hub_kernels.get_kernel_mapping_transformers()
    stock = hub_kernels._build_kernel_mapping()
    for layer, devices in stock.items():
        for device, entry in devices.items():
            if device != "npu":
                assert table[layer][device] == entry
    model = load(checkpoint("olmo3"))  # another layer than that of their mark serves its norms
    assert {row.kernel for row in kernels_ext_npu.report(model) if row.class_name == "Olmo3RMSNorm"} == {
        "RMSNormCastLast"
    }
    assert Olmo3RMSNorm.kernel_layer_name == "RMSNorm"  # by which other devices find theirs


def test_registering_twice_takes_the_second_source(checkpoint) -> None:
    kernels_ext_npu.register()
    kernels_ext_npu.register(source=ROOT)
    entry = hub_kernels.get_kernel_mapping_transformers()["RMSNorm"]["npu"]
    assert str(ROOT / "RMSNorm") in str(entry)
    assert counts(load(checkpoint("qwen3"))) == (9, 9)


def test_the_hub_is_named_as_the_source_without_a_request() -> None:
    kernels_ext_npu.register(source="hub")
    entry = hub_kernels.get_kernel_mapping_transformers()["RMSNormGated"]["npu"]
    assert (entry._repo_id, entry._version, entry.layer_name) == ("kernels-ext-npu/RMSNorm", 1, "RMSNormGated")
    assert entry._trust_remote_code == ["kernels-ext-npu/RMSNorm"]


def test_a_module_that_contains_a_model_is_kernelized_and_restored(checkpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), device_map="npu")
    wrapped = nn.ModuleDict({"policy": model, "head": nn.Linear(4, 1).to("npu")})
    assert kernels_ext_npu.kernelize(wrapped) is wrapped  # registers by itself
    assert counts(wrapped) == (5, 5)
    wrapped.train()
    assert counts(wrapped) == (5, 5)
    assert kernels_ext_npu.restore(wrapped) is wrapped
    wrapped.eval()
    assert counts(wrapped) == (0, 5)
    assert not [m for m in model.modules() if "forward" in vars(m) and m.forward.__func__ is not type(m).forward]
    assert counts(kernels_ext_npu.kernelize(wrapped)) == (5, 5)


@pytest.mark.parametrize(("name", "is_marked_rightly"), [("qwen3", True), ("gemma3_text", True), ("olmo3", False)])
def test_kernels_own_kernelize_takes_what_is_marked(registered, checkpoint, name, is_marked_rightly) -> None:
    """By transformers or by us. It takes no kernel out, and none for norms that are marked for what others compute."""
    import kernels

    model = load(checkpoint(name))
    _, norms = counts(model)
    kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="npu")
    assert counts(model) == (norms, norms)
    kernels_ext_npu.restore(model)
    kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="npu")
    assert counts(model) == (norms * is_marked_rightly, norms)


def test_transformers_starts_torch_distributed_with_hccl_while_registered(registered) -> None:
    assert distributed.get_distributed_backend("npu") == "hccl"
    kernels_ext_npu.unregister()
    with pytest.raises(ValueError, match="No distributed backend found for device type 'npu'"):
        distributed.get_distributed_backend("npu")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_backend_that_somebody_else_named_stays(monkeypatch, when) -> None:
    monkeypatch.setitem(distributed.DISTRIBUTED_BACKEND_MAP, "npu", "own")
    if when == "meanwhile":
        del distributed.DISTRIBUTED_BACKEND_MAP["npu"]
    kernels_ext_npu.register()
    distributed.DISTRIBUTED_BACKEND_MAP["npu"] = "own"
    kernels_ext_npu.register()
    kernels_ext_npu.unregister()
    assert distributed.get_distributed_backend("npu") == "own"


def test_strict_names_what_is_kept(checkpoint) -> None:
    kernels_ext_npu.register(strict=True)
    load(checkpoint("qwen3"))
    load(checkpoint("gpt2"))  # layer norms are nobody's business
    kept = r"2 modules and functions stay as they were\n.*mamba.norm \(FalconH1RMSNormGated\): no kernel"
    with pytest.raises(RuntimeError, match=kept):
        load(checkpoint("falcon_h1"), mamba_rms_norm=True)


def test_the_mapping_has_the_layers_of_the_references_and_the_kernels_have_them() -> None:
    served = {layer: reference.repository for reference in PATTERNS for layer in reference.layers}
    assert served | {reference.layers[0]: reference.repository for reference in FUNCTION_PATTERNS} == LAYERS
    assert set(LAYERS.values()) | {"FlashAttention"} == {repository.name for repository in catalogue.SERVING}
    for layer, repository in LAYERS.items():
        assert sources.layer_sources("bundled", {layer: repository})[layer].load().__name__ == layer
