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
from transformers import AutoModelForCausalLM

from tests.distributed import matrix, models, splitting
from tests.distributed.launching import ROOT, TORCHRUN, launch
from tests.distributed.models import Tensors
from tests.distributed.processes import Processes
from tests.support import zoo

pytestmark = pytest.mark.distributed

NAME, HUB_NAME = "npu_flash_attention", "kernels-ext-npu/flash-attn"
MASK = torch.ones(models.ROWS, 1, models.LENGTH // 2, models.LENGTH // 2, dtype=torch.bool)  # of a caller


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
        ("Qwen3", None, {"output_attentions": True}),  # torch computes, and transformers warns that it gets none
        ("Qwen3", None, {"packed": True, "is_forward_called": True}),
        ("Qwen3", None, {"padding": 2}),
        ("Gemma 3", None, {"padding": 1}),  # ten tokens, of which each device has one block
        ("Qwen3-MoE", None, {}),
        ("Gemma 3", None, {}),
        ("Gemma 3", NAME, {"packed": True}),
        ("gpt-oss", None, {}),
        ("gpt-oss", NAME, {"padding": 4}),  # blocks of four tokens, of which a window of four sees three
        ("Qwen3-Next", None, {}),  # blocks of two tokens: convolutions of four see those of several devices
        ("Qwen3.5", None, {"padding": 4}),
        ("Kimi Linear", None, {}),
    ],
)
def test_context_parallelism(model, attention, options, two_ranks, checkpoints, truths) -> None:
    for found in two_ranks.run(splitting.step, "torch", checkpoints[model], attention, **options):
        assert_equal(found, truths[model])


@pytest.mark.parametrize(
    ("model", "attention", "options", "sentence"),
    [
        ("Qwen3-Next", None, {"use_cache": True}, "ChunkGatedDeltaRule: .* give the model use_cache=False"),
        (
            "Qwen3",
            None,
            {"withheld": "shift_labels"},
            "Qwen3ForCausalLM: .* give the model shift_labels, too, and split",
        ),
        (
            "Qwen3",
            None,
            {"withheld": "shift_labels", "is_forward_called": True},
            "Qwen3ForCausalLM: .* give the model shift_labels, too, and split",
        ),
        ("gpt-oss", None, {"withheld": "position_ids"}, "give the model position_ids, and split them as a buffer"),
        (
            "Qwen3",
            NAME,
            {"output_attentions": True},
            "Qwen3Attention: .* the kernel does not compute output_attentions",
        ),
        ("gpt-oss", None, {"output_attentions": True}, "eager: torch's context_parallel exchanges keys"),
        ("Qwen3", None, {"attention_mask": MASK}, "Qwen3Attention: .* the kernel does not compute such a mask"),
        ("Qwen3", None, {"hole": True}, "padding between tokens of one sequence: pad in front of it or behind it"),
    ],
)
def test_what_context_parallelism_does_not_compute_is_refused(
    model, attention, options, sentence, two_ranks, checkpoints
) -> None:
    for error in two_ranks.run(splitting.error_of_step, "torch", checkpoints[model], attention, **options):
        assert re.search(sentence, error), error


@pytest.mark.parametrize(
    ("model", "attention", "options"),
    [
        ("Gemma 3", None, {}),  # with one token to a block windows of four reach over several devices
        # with two key heads two neighbours exchange heads, and gather keys of the other two
        ("Qwen3", None, {"packed": True}),
        ("Qwen3", NAME, {"padding": 2}),  # twelve tokens, of which each device has one block
        ("gpt-oss", None, {"padding": 4}),  # blocks of two tokens; of two together a window of four sees three
        ("gpt-oss, no groups", None, {}),  # as many key heads as heads: devices exchange them, and sinks with them
        ("gpt-oss, no groups", NAME, {"padding": 4}),
        ("Kimi Linear", None, {}),
        ("Qwen3-Next", None, {}),  # whose two heads of keys are repeated for four of values
    ],
)
def test_context_parallelism_over_four_devices(model, attention, options, four_ranks, checkpoints, truths) -> None:
    for found in four_ranks.run(splitting.step, "torch", checkpoints[model], attention, **options):
        assert_equal(found, truths[model])


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Processes]:
    processes = Processes(8)
    yield processes
    processes.stop()


def test_eight_devices_of_which_four_neighbours_share_four_key_heads(eight_ranks, checkpoints, truths) -> None:
    for found in eight_ranks.run(splitting.step, "torch", checkpoints["Qwen3, groups"], None, packed=True):
        assert_equal(found, truths["Qwen3, groups"])


def test_groups_of_neighbours_do_not_wait_for_devices_that_have_other_rows(eight_ranks) -> None:
    found = eight_ranks.run(splitting.groups_of_neighbours, seconds=20)
    assert found == [None] * 4 + [([4, 5], [4, 6]), ([4, 5], [5, 7]), ([6, 7], [4, 6]), ([6, 7], [5, 7])]


def test_devices_that_are_more_than_heads_of_a_recurrence_are_refused(eight_ranks, checkpoints) -> None:
    for error in eight_ranks.run(splitting.error_of_step, "torch", checkpoints["Kimi Linear"], None, padding=4):
        assert "8 devices, which cannot share 4 heads of a recurrence: let a divisor of these share a sequence" in error


@pytest.mark.parametrize(
    ("reach", "gathers", "messages"),
    [(None, True, 2), (3, True, 2), (None, False, 3)],
    ids=["keys and values", "those of windows", "heads"],
)
def test_all_messages_of_a_layer_travel_before_one_is_waited_for(reach, gathers, messages, two_ranks) -> None:
    for of_rank in two_ranks.run(splitting.messages_of_attention, reach, gathers):
        for events in of_rank:
            assert events[:messages] == ["sent"] * messages
            assert set(events[messages:]) == {"taken"}


@pytest.mark.parametrize(("length", "parts"), [(7, "2, 2, 2, 1"), (5, "2, 2, 1, 0"), (2, "1, 1, 0, 0")])
def test_parts_of_different_lengths_are_refused(length, parts, four_ranks, checkpoints) -> None:
    for model in ("Qwen3", "Qwen3-Next"):
        for error in four_ranks.run(splitting.error_of_step, "torch", checkpoints[model], None, length=length):
            assert f"which have parts of {parts} tokens: pad to a multiple of 8" in error


def test_the_example_trains_on_four_devices_as_one_process_does(tmp_path) -> None:
    """Losses of three steps in float32, to what is printed of them."""
    tokens = 1024
    folder = tmp_path / "Qwen/Qwen3-0.6B"
    zoo.build("qwen3").save_pretrained(folder)
    script = (ROOT / "examples/split_sequences.py").read_text().replace('"bfloat16"', '"float32"')
    (tmp_path / "script.py").write_text(script)
    launched = launch(
        TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "softnpu", "script.py", str(tokens),
        directory=tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'integration'}", TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )  # fmt: skip
    assert launched.code == 0, launched.output
    assert "→ npu_flash_attention" in launched.output

    model = AutoModelForCausalLM.from_pretrained(folder).train()
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    expected = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(f"{loss.item():.4f}")
    assert re.findall(r"loss (\S+)", launched.output) == expected


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
