"""``npu_grouped_mm``: who takes it, who keeps what he asked for, and how it ends."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import kernels_ext_npu
from tests.support import npu_counts, served, zoo
from tests.support.nearness import assert_near

NAME = "npu_grouped_mm"


def load(folder: Path, **options) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, device_map="npu", **options)


def served_modules(model: nn.Module) -> int:
    """How many experts modules ours computes in a forward: it permutes tokens by an operator, once for each."""
    npu_counts.reset()
    logits(model)
    return npu_counts.read().get("npu_moe_token_permute", 0)


rows = partial(served.rows, kind="experts")


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(8, device=model.device)[None]).logits.cpu()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_on_the_npu_takes_the_grouped_implementation_without_being_asked(
    registered, checkpoint, tmp_path, name
) -> None:
    """The config that is saved does not name it."""
    model = load(checkpoint(name))
    assert model.config._experts_implementation == NAME
    served = rows(model)
    assert served
    assert all(row.swapped and row.kernel == "MoEExperts" and NAME in row.reason for row in served)
    assert served_modules(model) == len(served)
    assert_near(logits(model), logits(zoo.build(name)))
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("named", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("use_kernels", [False, True])
def test_an_experts_implementation_that_was_asked_for_stays(registered, checkpoint, named, use_kernels) -> None:
    model = load(checkpoint("qwen3_moe"), experts_implementation=named, use_kernels=use_kernels)
    assert model.config._experts_implementation == named
    assert served_modules(model) == 0
    (row, *_) = rows(model)
    assert not row.swapped
    if use_kernels:
        assert row.reason == f"the experts implementation {named} was asked for"


def test_the_default_that_was_asked_for_stays_in_copies_and_after_another_register(checkpoint) -> None:
    kernels_ext_npu.register()
    model = load(checkpoint("qwen3_moe"), experts_implementation="grouped_mm")
    kernels_ext_npu.register()
    for one in (copy.deepcopy(model), model):
        assert served_modules(kernels_ext_npu.kernelize(one)) == 0
        assert {row.reason for row in rows(one)} == {"the experts implementation grouped_mm was asked for"}


def test_kernelize_gives_the_grouped_implementation_to_a_model_that_was_loaded_before(checkpoint) -> None:
    model = load(checkpoint("qwen3_moe"))
    assert model.config._experts_implementation == "grouped_mm"
    kernels_ext_npu.kernelize(model)
    assert all(row.swapped for row in rows(model))
    assert served_modules(model) == 2
    kernels_ext_npu.restore(model)
    assert model.config._experts_implementation == "grouped_mm"
    assert served_modules(model) == 0
    assert not any(hasattr(module, "_fused_moe_gate") for module in model.modules())


def test_unregister_gives_the_default_experts_implementation_back(checkpoint) -> None:
    kernels_ext_npu.register()
    model, swapped = load(checkpoint("qwen3_moe")), load(checkpoint("qwen3_moe"), use_kernels=True)
    named = load(checkpoint("qwen3_moe"), experts_implementation=NAME)
    assert NAME in ALL_EXPERTS_FUNCTIONS
    kernels_ext_npu.unregister()
    assert NAME not in ALL_EXPERTS_FUNCTIONS
    assert model.config._experts_implementation == named.config._experts_implementation == "grouped_mm"
    assert served_modules(model) == served_modules(named) == 0
    assert served_modules(swapped) == 2  # until it is restored
    assert served_modules(kernels_ext_npu.restore(swapped)) == 0
    assert load(checkpoint("qwen3_moe")).config._experts_implementation == "grouped_mm"
    with pytest.raises(ValueError, match="not supported"):
        load(checkpoint("qwen3_moe"), experts_implementation=NAME)


def test_tensors_may_be_made_on_the_npu_by_default(registered) -> None:
    """What is computed on the host to tell a gate says so itself."""
    model = zoo.build("qwen3_moe").to("npu")
    torch.set_default_device("npu")
    try:
        kernels_ext_npu.kernelize(model)
        assert served_modules(model) == 2
    finally:
        torch.set_default_device(None)


def test_a_report_needs_no_kernel_that_cannot_be_loaded(checkpoint) -> None:
    """Offline, with nothing in the cache: what is wrong is said by the forward."""
    kernels_ext_npu.register(source="hub")
    model = load(checkpoint("qwen3_moe"))
    assert all(row.swapped for row in rows(model))
    with pytest.raises(ValueError, match="not available in the local cache"):
        served_modules(model)
    kernels_ext_npu.restore(model)
    assert served_modules(model) == 0


def test_a_kernel_that_was_loaded_twice_serves_all_the_same(registered) -> None:
    """Another load makes another package of the same name, which does not have its modules as attributes."""
    model = kernels_ext_npu.kernelize(zoo.build("qwen3_moe").to("npu"))
    get_local_kernel(Path(__file__).parents[4] / "FusedMoE" / "build" / "torch-npu")
    kernels_ext_npu.kernelize(model.train())
    assert all(row.swapped for row in rows(model))
    kernels_ext_npu.restore(model)
