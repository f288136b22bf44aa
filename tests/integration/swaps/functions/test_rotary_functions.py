"""Rotary functions in whole models: what they launch, and that each is one object for the process."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

import kernels_ext_npu
from kernels_ext_npu.reporting import report as reporting
from tests.support import zoo
from tests.support.served import kernelized, rows

calls = partial(rows, kind="rotary calls")


@torch.no_grad()
def forward(model: PreTrainedModel, name: str) -> Tensor:
    return zoo.logits(name, model)


@pytest.mark.parametrize("name", ["qwen3", "phi3"])  # decorated by transformers, and not
def test_a_model_on_the_cpu_computes_the_same_while_another_has_kernels(name) -> None:
    twin = zoo.build(name)
    expected = forward(twin, name)
    kernels_ext_npu.register()
    kernelized(name)
    assert torch.equal(forward(twin, name), expected)
    assert {row.reason.partition(":")[0] for row in calls(twin)} == {"it is on cpu"}
    kernels_ext_npu.unregister()
    assert torch.equal(forward(twin, name), expected)


def test_a_model_with_use_kernels_on_the_cpu_takes_no_kernels_away(registered, checkpoint) -> None:
    model = kernelized("qwen3")
    with pytest.warns(UserWarning, match="is on cpu, and kernels are swapped in for models on the NPU"):
        other = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), use_kernels=True)
    assert all(row.swapped for row in calls(model))
    assert not any(row.swapped for row in calls(other))
    with pytest.warns(UserWarning, match="is on cpu"):
        other.train()
    assert all(row.swapped for row in calls(model))


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_models_of_one_architecture_share_a_rotary_function_and_the_report_says_so(registered, name) -> None:
    model, plain = kernelized(name), zoo.build(name).to("npu")
    assert all(row.swapped for row in [*calls(model), *calls(plain)])
    assert " ".join(str(kernels_ext_npu.report(model)).split()).count(reporting.SHARED) == 1
    expected = forward(zoo.build(name), name)
    for both in (model, plain):
        assert (forward(both, name).cpu() - expected).norm() <= 1e-5 * expected.norm()
    kernels_ext_npu.restore(plain)
    for row in [*calls(model), *calls(plain)]:
        assert not row.swapped
        assert "restore() was called" in row.reason
    assert reporting.SHARED[:20] not in str(kernels_ext_npu.report(model))
    kernels_ext_npu.kernelize(model)
    assert all(row.swapped for row in calls(plain))


def test_a_function_that_a_user_replaces_is_in_no_copy_and_in_no_pickle(registered, monkeypatch) -> None:
    model = kernelized("qwen3")
    held = [module._kernel_funcs for module in model.modules() if hasattr(module, "_kernel_funcs")]
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda *args, **kwargs: args)
    twin = copy.deepcopy(model)
    assert held == [module._kernel_funcs for module in twin.modules() if hasattr(module, "_kernel_funcs")] != []
    kernels_ext_npu.kernelize(twin)
    with pytest.raises(pickle.PicklingError, match="replaced in its file; put it back"):
        pickle.dumps(model)


def test_a_replacement_by_another_library_stays(monkeypatch) -> None:
    """Libraries of kernels for other devices put their own functions there."""
    before = modeling_phi3.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_phi3, "apply_rotary_pos_emb", before)  # what is put back in the end, not ours
    kernels_ext_npu.register()
    model = kernelized("phi3")
    replacement = partial(before)
    monkeypatch.setattr(modeling_phi3, "apply_rotary_pos_emb", replacement)
    expected = forward(zoo.build("phi3"), "phi3")
    for _ in range(2):
        assert {(row.swapped, row.reason) for row in calls(model)} == {(False, "no kernel computes what it computes")}
        assert (forward(model, "phi3").cpu() - expected).norm() <= 1e-5 * expected.norm()
        kernels_ext_npu.kernelize(model)
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()
    assert modeling_phi3.apply_rotary_pos_emb is replacement
