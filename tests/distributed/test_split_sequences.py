"""Sequences that torch or a framework splits between devices: loss and gradients of whole ones, or a sentence.

ms-swift 4.6.0, DeepSpeed 0.19.8 and verl 0.9.1 are no requirements: their tests run where ``PYTHONPATH`` has them.
"""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels_ext_npu.demo import tiny_checkpoints
from tests.distributed import matrix, models, splitting
from tests.distributed.launching import ROOT, TORCHRUN, launch
from tests.distributed.models import Tensors
from tests.distributed.processes import Processes

pytestmark = pytest.mark.distributed

# float32: steps in which sums are in another order. One process is up to 4e-6 from what it would be in float64.
RELATIVE = 1e-5
TWO, FOUR, EIGHT = "two_ranks", "four_ranks", "eight_ranks"
STEPS = 10
NAME, HUB_NAME = "npu_flash_attention", "kernels-ext-npu/flash-attn"
SHIFTED = "Qwen3ForCausalLM: .* give the model shift_labels, too, and split"
MASK = torch.ones(models.ROWS, 1, models.LENGTH // 2, models.LENGTH // 2, dtype=torch.bool)  # of a caller


def assert_equal(found: list[Tensors], truth: list[Tensors]) -> None:
    """Compare what there is of each step, and of the weights behind them."""
    assert len(found) == len(truth)
    for number, (ours, theirs) in enumerate(zip(found, truth)):
        assert ours.keys() == theirs.keys()
        length = torch.cat([tensor.flatten() for name, tensor in theirs.items() if name != "loss"]).norm()
        wrong = {name: ours[name] - tensor for name, tensor in theirs.items()}
        assert wrong.pop("loss", torch.zeros(())).abs() <= RELATIVE, number
        assert torch.cat([tensor.flatten() for tensor in wrong.values()]).norm() <= RELATIVE * length, number
        for name, tensor in wrong.items():  # a small one may be wrong as a whole
            assert tensor.abs().max() <= matrix.TOLERANCE, (number, name)


# ---- ten steps by torch's context parallelism ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("Qwen3", "padded", {}),
        ("Qwen3", "packed", {"is_adapted": True}),
        ("Gemma 3", "rows", {}),  # windows of four tokens, over blocks of two
        ("Gemma 3", "packed", {"attention": NAME}),
        ("gpt-oss", "padded", {}),
        ("Qwen3-Next", "padded", {}),
        ("Qwen2.5-VL", "rows", {}),  # each device has some tokens of an image that it sees as a whole
        # on four devices two share rows, two share experts, and FSDP2 shards all other weights over four
        ("Qwen3-MoE", "packed", {"experts": 2}),
        ("gpt-oss", "padded", {"experts": 2}),
    ],
)
def test_ten_steps(model, layout, options, request, checkpoints, truths) -> None:
    ranks = request.getfixturevalue(FOUR if "experts" in options else TWO)
    truth = truths(model, steps=STEPS, rate=splitting.RATE, is_adapted="is_adapted" in options)
    for found in ranks.run(splitting.split, checkpoints(model), layout=layout, steps=STEPS, **options):
        assert_equal(found, truth)


# ---- a step by torch's context parallelism ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "model", "attention", "options"),
    [
        (TWO, "Qwen3", NAME, {}),
        (TWO, "Qwen3", None, {"output_attentions": True}),  # torch computes, and transformers warns that it gets none
        (TWO, "Qwen3", None, {"layout": "packed", "is_forward_called": True}),
        (TWO, "Gemma 3", None, {"padding": 1}),  # ten tokens, of which each device has one block
        (TWO, "gpt-oss", None, {}),
        (TWO, "gpt-oss", NAME, {"padding": 4}),  # blocks of four tokens, of which a window of four sees three
        (TWO, "Qwen3-Next", None, {}),  # blocks of two tokens: convolutions of four see those of several devices
        (TWO, "Qwen3.5", None, {"padding": 4}),
        (TWO, "Kimi Linear", None, {}),
        # models that give their masks no positions
        (TWO, "BERT", None, {}),
        (TWO, "BERT", None, {"padding": 1}),
        (TWO, "BERT, decoder", None, {"layout": "padded"}),
        (TWO, "Llama 4", None, {}),  # chunks that hold whole rows
        (FOUR, "Gemma 3", None, {}),  # with one token to a block windows of four reach over several devices
        # with two key heads two neighbours exchange heads, and gather keys of the other two
        (FOUR, "Qwen3", None, {"layout": "packed"}),
        (FOUR, "Qwen3", NAME, {"padding": 2}),  # twelve tokens, of which each device has one block
        (FOUR, "gpt-oss", None, {"padding": 4}),  # blocks of two tokens; of two together a window of four sees three
        # as many key heads as heads: devices exchange them, and sinks with them
        (FOUR, "gpt-oss, no groups", None, {}),
        (FOUR, "gpt-oss, no groups", NAME, {"padding": 4}),
        (FOUR, "Kimi Linear", None, {}),
        (FOUR, "Qwen3-Next", None, {}),  # whose two heads of keys are repeated for four of values
        (EIGHT, "Qwen3, groups", None, {"layout": "packed"}),  # four neighbours share four key heads
    ],
)
def test_context_parallelism(size, model, attention, options, request, checkpoints, truths) -> None:
    ranks = request.getfixturevalue(size)
    for found in ranks.run(splitting.split, checkpoints(model), attention, **options):
        assert_equal(found[:1], truths(model)[:1])


@pytest.mark.parametrize(
    ("model", "attention", "options", "sentence"),
    [
        ("Qwen3-Next", None, {"use_cache": True}, "ChunkGatedDeltaRule: .* give the model use_cache=False"),
        ("Qwen3", None, {"withheld": "shift_labels"}, SHIFTED),
        ("Qwen3", None, {"withheld": "shift_labels", "is_forward_called": True}, SHIFTED),
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
        ("Llama 4, chunks", None, {}, "the kernel does not compute attention in chunks of 6 tokens"),
        ("Llama 4, chunks", None, {"padding": 1}, "the kernel does not compute attention in chunks of 6 tokens"),
    ],
)
def test_what_context_parallelism_does_not_compute_is_refused(
    model, attention, options, sentence, two_ranks, checkpoints
) -> None:
    for error in two_ranks.run(splitting.refusal, checkpoints(model), attention, **options):
        assert re.search(sentence, error), error


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Processes]:
    with closing(Processes(8)) as processes:
        yield processes


def test_groups_of_neighbours_do_not_wait_for_devices_that_have_other_rows(eight_ranks) -> None:
    found = eight_ranks.run(splitting.groups_of_neighbours, seconds=20)
    assert found == [None] * 4 + [([4, 5], [4, 6]), ([4, 5], [5, 7]), ([6, 7], [4, 6]), ([6, 7], [5, 7])]


def test_devices_that_are_more_than_heads_of_a_recurrence_are_refused(eight_ranks, checkpoints) -> None:
    for error in eight_ranks.run(splitting.refusal, checkpoints("Kimi Linear"), padding=4):
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


@pytest.mark.parametrize("model", ["Qwen3", "Qwen3-Next", "BERT", "BERT, decoder"])
@pytest.mark.parametrize(
    ("length", "padding", "parts"),
    [(7, 0, "2, 2, 2, 1"), (5, 0, "2, 2, 1, 0"), (2, 0, "1, 1, 0, 0"), (5, 1, "2, 2, 2, 1")],
)
def test_parts_of_different_lengths_are_refused(model, length, padding, parts, four_ranks, checkpoints) -> None:
    options = {"length": length, "padding": padding}
    for error in four_ranks.run(splitting.refusal, checkpoints(model), seconds=20, **options):
        assert f"which have parts of {parts} tokens: pad to a multiple of 8" in error


def test_the_example_trains_on_four_devices_as_one_process_does(tmp_path) -> None:
    """With ``--tiny``: losses of three steps in float32, to what is printed of them."""
    tokens = 128
    tiny_checkpoints.save("Qwen3", tmp_path)
    script = (ROOT / "examples/split_sequences.py").read_text().replace('"bfloat16"', '"float32"')
    (tmp_path / "script.py").write_text(script)
    launched = launch(
        TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "softnpu", "script.py", "--tiny",
        directory=tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'integration'}", TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )  # fmt: skip
    assert launched.code == 0, launched.output
    assert "→ npu_flash_attention" in launched.output

    model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
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
    assert re.findall(r"loss (\d+\.\d+)", launched.output) == expected


# ---- frameworks ------------------------------------------------------------------------------------------------------
@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Two processes for one test: what a framework replaces in transformers stays replaced."""
    framework = request.getfixturevalue("framework")
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    with closing(Processes(2)) as processes:
        yield processes


@pytest.mark.parametrize(
    ("framework", "model", "attention", "layout"),
    [
        ("swift", "Llama", None, "rows"),
        ("swift", "Qwen3", "sdpa", "packed"),
        ("swift", "Gemma 3", None, "rows"),
        ("swift", "Qwen3", "flash_attention_2", "packed"),
        ("deepspeed", "Qwen3", None, "rows"),
        ("deepspeed", "Qwen3", HUB_NAME, "packed"),
        ("deepspeed", "Gemma 3", HUB_NAME, "rows"),
        ("verl", "Qwen3", "flash_attention_2", "packed"),
    ],
)
def test_a_framework_gathers_heads_around_attention(
    framework, model, attention, layout, ranks, checkpoints, truths
) -> None:
    for found in ranks.run(splitting.split, checkpoints(model), attention, layout, framework=framework):
        assert_equal(found[:1], truths(model)[:1])


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
    for error in ranks.run(splitting.refusal, checkpoints(model), attention, framework=framework):
        assert re.search(sentence, error), error
