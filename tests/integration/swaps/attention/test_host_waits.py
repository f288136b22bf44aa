"""How often the host waits in models whose files, towers and biases are unlike those of a plain language model."""

import pytest
import torch

import kernels_ext_npu
from tests.support import npu_counts, zoo


def waits(name: str, is_trained: bool, is_padded: bool, implementation: str | None = None) -> int:
    """Count the waits of a forward, or of a step that trains, once it has been done before."""
    model = kernels_ext_npu.kernelize(zoo.build(name).to("npu"))
    if implementation is not None:
        model.set_attn_implementation(implementation)
    inputs = zoo.inputs(name, model)
    if not is_padded:
        inputs.pop("attention_mask", None)
    for _ in range(2):
        npu_counts.reset()
        with torch.set_grad_enabled(is_trained):
            outputs = model(**inputs)
            if is_trained:
                zoo.loss(outputs).backward()
        found = npu_counts.read()["stream_syncs"]
    return found


@pytest.mark.parametrize("is_trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_an_audio_encoder_in_the_file_of_a_text_model_costs_no_waits(registered, name, is_trained) -> None:
    assert waits(name, is_trained, is_padded=True) == 1
    assert waits(name, is_trained, is_padded=False) == 0


@pytest.mark.parametrize("name", ["swin", "doge"])
def test_biases_of_heads_are_not_looked_at(registered, name) -> None:
    assert waits(name, is_trained=False, is_padded=True) == waits(name, is_trained=True, is_padded=True) == 0


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_towers_that_name_ours_are_not_asked_for_the_longest_sequence(registered, name) -> None:
    named, unnamed = (waits(name, False, True, implementation) for implementation in ("npu_flash_attention", None))
    assert named == unnamed
