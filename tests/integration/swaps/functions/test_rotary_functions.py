"""Rotary functions of transformers in whole models: what is swapped, what it computes, and that it can be undone."""

import torch

import softnpu
from kernels_ext_npu.swaps import functions
from tests.support.rotary_functions import forward, kernelized


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
