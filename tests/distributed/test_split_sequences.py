"""Sequences that torch or a framework splits between devices: loss and gradients of whole ones, or a sentence.

ms-swift 4.6.0, DeepSpeed 0.19.8 and verl 0.9.1 are no requirements: their tests run where ``PYTHONPATH`` has them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed import matrix, splitting
from tests.distributed.models import Tensors
from tests.distributed.processes import Processes

pytestmark = pytest.mark.distributed

NAME, HUB_NAME = "npu_flash_attention", "kernels-ext-npu/flash-attn"


def assert_equal(found: Tensors, truth: Path) -> None:
    expected = torch.load(truth)[0]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=matrix.TOLERANCE, msg=name)


# ---- torch's context parallelism -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "attention", "options"),
    [
        ("Qwen3", NAME, {}),
        ("Qwen3", None, {"packed": True}),
        ("Qwen3", None, {"padding": 2}),
        ("Gemma 3", None, {"padding": 1}),  # ten tokens, of which each device has one block
        ("Qwen3-MoE", None, {}),
        ("Gemma 3", None, {}),
        ("Gemma 3", NAME, {"packed": True}),
        ("gpt-oss", None, {}),
        ("gpt-oss", NAME, {}),
    ],
)
def test_context_parallelism(model, attention, options, two_ranks, checkpoints, truths) -> None:
    for found in two_ranks.run(splitting.step, "torch", checkpoints[model], attention, **options):
        assert_equal(found, truths[model])


@pytest.mark.parametrize(
    ("model", "attention", "options", "sentence"),
    [
        ("Qwen3-Next", None, {}, "Qwen3NextGatedDeltaNet: .* its convolution and recurrence would begin anew"),
        (
            "Qwen3",
            None,
            {"withheld": "shift_labels"},
            "Qwen3ForCausalLM: .* give the model shift_labels, too, and split",
        ),
        ("gpt-oss", None, {"withheld": "position_ids"}, "give the model position_ids, and split them as a buffer"),
        ("Qwen3", None, {"hole": True}, "padding between tokens of one sequence: pad in front of it or behind it"),
    ],
)
def test_what_context_parallelism_does_not_compute_is_refused(
    model, attention, options, sentence, two_ranks, checkpoints
) -> None:
    for error in two_ranks.run(splitting.error_of_step, "torch", checkpoints[model], attention, **options):
        assert re.search(sentence, error), error


def test_context_parallelism_over_four_devices(four_ranks, checkpoints, truths) -> None:
    """With one token to a block: windows of four reach over several devices."""
    for found in four_ranks.run(splitting.step, "torch", checkpoints["Gemma 3"], None):
        assert_equal(found, truths["Gemma 3"])


def test_parts_of_different_lengths_are_refused(four_ranks, checkpoints) -> None:
    for error in four_ranks.run(splitting.error_of_step, "torch", checkpoints["Qwen3"], None, padding=1):
        assert "which have parts of 3, 3, 3, 1 tokens: pad to a multiple of 8" in error


# ---- frameworks ------------------------------------------------------------------------------------------------------
@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Two processes for one test: what a framework replaces in transformers stays replaced."""
    framework = request.getfixturevalue("framework")
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    processes = Processes(2)
    yield processes
    processes.stop()


@pytest.mark.parametrize(
    ("framework", "model", "attention", "packed"),
    [
        ("swift", "Llama", None, False),
        ("swift", "Qwen3", "sdpa", True),
        ("swift", "Gemma 3", None, False),
        ("swift", "Qwen3", "flash_attention_2", True),
        ("deepspeed", "Qwen3", None, False),
        ("deepspeed", "Qwen3", HUB_NAME, True),
        ("deepspeed", "Gemma 3", HUB_NAME, False),
        ("verl", "Qwen3", "flash_attention_2", True),
    ],
)
def test_a_framework_gathers_heads_around_attention(
    framework, model, attention, packed, ranks, checkpoints, truths
) -> None:
    for found in ranks.run(splitting.step, framework, checkpoints[model], attention, packed):
        assert_equal(found, truths[model])


@pytest.mark.parametrize(
    ("framework", "model", "attention", "sentence"),
    [
        ("swift", "Qwen3", NAME, "ms-swift splits .* choose --attn_impl sdpa or flash_attention_2"),
        ("swift", "gpt-oss", None, "eager: ms-swift splits sequences between devices, and gathers nothing around"),
        ("swift", "Qwen3-Next", None, "Qwen3NextGatedDeltaNet: ms-swift splits"),
        ("deepspeed", "gpt-oss", HUB_NAME, "DeepSpeed splits 4 heads between devices, and not their sinks"),
        ("verl", "Qwen3", "sdpa", 'sdpa: verl splits .* choose attn_implementation="flash_attention_2"'),
    ],
)
def test_what_a_framework_does_not_gather_is_refused(framework, model, attention, sentence, ranks, checkpoints) -> None:
    for error in ranks.run(splitting.error_of_step, framework, checkpoints[model], attention):
        assert re.search(sentence, error), error
