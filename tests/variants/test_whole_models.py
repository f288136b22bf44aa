"""Whole models on the device, loaded with kernels, against the same checkpoint on the CPU."""

from pathlib import Path

import pytest
import torch
from kernels import get_loaded_kernels
from transformers import AutoModelForCausalLM

import kernels_ext_npu
from kernels_ext_npu.catalogue import IMPLEMENTATION, LAYERS
from kernels_ext_npu.swaps.loss import lm_head_loss
from tests.support import zoo
from tests.support.agreement import assert_agrees

# architecture -> the repositories that serve it
MODELS = {
    "qwen3": {"RMSNorm", "RoPE", "SwiGLU", "FlashAttention", "CrossEntropy"},
    "gemma3_text": {"RMSNorm", "RoPE", "SwiGLU", "FlashAttention", "CrossEntropy"},
    "qwen3_moe": {"RMSNorm", "RoPE", "FusedMoE", "FlashAttention", "CrossEntropy"},
}
REPOSITORY_OF = LAYERS | {IMPLEMENTATION: "FlashAttention", lm_head_loss.NAME: "CrossEntropy"}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_loaded_with_kernels_agrees_with_the_cpu(
    registered, repositories: Path, variant: str, largest, name: str, tmp_path: Path
) -> None:
    """Logits, all gradients, and generated tokens; every kernel is of the variant that has to be taken."""
    zoo.build(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="npu", use_kernels=True)
    rows = kernels_ext_npu.report(model)
    assert {REPOSITORY_OF[row.kernel] for row in rows if row.swapped} == MODELS[name]
    assert all(row.swapped or row.reason for row in rows)
    loaded = [Path(kernel.module.__file__).parent for kernel in get_loaded_kernels()]
    assert {path.name for path in loaded if path.is_relative_to(repositories)} == {variant}
    largest("models", torch.float32, assert_agrees(name, model))
