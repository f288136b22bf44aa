"""Rotary functions of transformers in whole models: what is swapped, what it computes, and that it can be undone."""

import inspect

import pytest
import torch
from torch import nn

import kernels_ext_npu
import softnpu
from kernels_ext_npu.matching import function_scan
from kernels_ext_npu.swaps import functions
from tests.support.rotary_functions import calls, forward, kernelized


def test_openai_privacy_filter(registered) -> None:
    """It is not in the zoo: half-width cos as gpt-oss, and neighbours."""
    from transformers.models.openai_privacy_filter import modeling_openai_privacy_filter as module

    attention = next(
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and [use.name for use in function_scan.uses(cls)] == ["apply_rotary_pos_emb"]
    )
    model = attention.__new__(attention)
    nn.Module.__init__(model)
    model.weight = nn.Parameter(torch.ones(1, device="npu"))
    kernels_ext_npu.kernelize(model)
    (row,) = calls(model)
    assert (row.swapped, row.kernel) == (True, "RotaryPosEmbInterleavedHalfWidth")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_without_rotation_have_no_rows_for_it(registered, name) -> None:
    assert not calls(kernelized(name))


def test_what_has_no_kernel_keeps_its_forward_and_says_so(registered) -> None:
    from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoRoPEAttention

    model = Sam2VideoRoPEAttention.__new__(Sam2VideoRoPEAttention)
    nn.Module.__init__(model)
    model.weight = nn.Parameter(torch.ones(1, device="npu"))
    kernels_ext_npu.kernelize(model)
    (row,) = calls(model)
    assert (row.swapped, row.kernel, row.reason) == (False, None, "no kernel computes what it computes")
    assert row.is_candidate


def test_a_decoder_layer_launches_two_and_nothing_else_for_it(registered) -> None:
    model = kernelized("qwen3")
    forward(model, "qwen3")  # makes the mask that all forwards share
    counts = []
    for _ in range(2):  # with kernels, and without
        softnpu.reset_counters()
        forward(model, "qwen3")
        counts.append(softnpu.counters())
        functions.revert(model)
    found, before = counts
    layers = model.config.num_hidden_layers
    assert found["npu_rotary_mul"] == 2 * layers
    assert before["cat"] - found.get("cat", 0) == 2 * layers  # those of rotate_half
    changed = {name for name in found if found[name] > before.get(name, 0)}
    assert changed == {"npu_rotary_mul"}


def test_a_step_of_generation_is_one_launch_a_layer_at_any_batch(registered) -> None:
    model = kernelized("qwen3")
    ids = torch.randint(2, 90, (16, 4), device="npu")
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        softnpu.reset_counters()
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert softnpu.counters()["npu_mrope"] == model.config.num_hidden_layers
    assert "npu_rotary_mul" not in softnpu.counters()
