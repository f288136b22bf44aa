"""Counted: what a training step moves and holds when the head and the loss are computed together."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import count, count_layers
from tests.support.costs import published
from tests.support.memory import Largest

MORE_BYTES = 1.06  # the logits of a piece beyond those kept are computed again, and every piece reads hidden states


def step(name: str, tokens: int, checkpointing: bool = False, with_loss: bool = True, counting: Any = count) -> Counts:
    """Count a step of a published model with all kernels, or all but CrossEntropy."""
    kernels_ext_npu.register(kernels=sorted({*REPOSITORIES} - (set() if with_loss else {"CrossEntropy"})))
    with published(name, tokens) as (model, counted):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return counted("step", counting)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("Qwen3-8B", 20.5),
        pytest.param("Gemma-3-12B", 34, marks=pytest.mark.long),
        pytest.param("gpt-oss-20b", 15, marks=pytest.mark.long),
    ],
)
def test_a_step_of_4096_tokens_holds_less_and_moves_hardly_more(name: str, peak: float) -> None:
    with_loss, without = step(name, 4096), step(name, 4096, with_loss=False)
    assert with_loss.peak / 1e9 <= peak
    assert with_loss.bytes.total() <= MORE_BYTES * without.bytes.total()
    assert with_loss.waits == without.waits == 0


def test_a_step_of_32768_tokens_with_checkpointing_holds_a_third() -> None:
    with_loss, without = (step("Qwen3-8B", 32768, checkpointing=True, with_loss=each) for each in (True, False))
    assert 3 * with_loss.peak <= without.peak
    assert with_loss.bytes.total() <= MORE_BYTES * without.bytes.total()
    assert step("Qwen3-8B", 32768).peak / 1e9 <= 142.5


def count_holding(phase: str, model: nn.Module, inputs: dict[str, Tensor], values: KnownValues, soc: Any) -> Counts:
    """Count a step of a loop that holds the output of the model."""

    def run(_: Any) -> None:
        outputs = model.train()(**inputs)
        outputs.loss.backward()
        model.zero_grad(set_to_none=True)

    return count_layers(model, inputs, lambda: Counting(values, soc, None), run)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_holding_the_output_costs_one_product_and_its_result(checkpointing: bool) -> None:
    """As docs/recipes.md says: hidden states and weight are read once more, logits of two bytes written and held."""
    tokens, words, width = 4096, 151_936, 4096
    held, let_go = (step("Qwen3-8B", tokens, checkpointing, counting=each) for each in (count_holding, count))
    logits = 2 * tokens * words
    assert held.launches - let_go.launches == {"matmul": 1}
    assert held.bytes.total() - let_go.bytes.total() == logits + 2 * width * (tokens + words)
    assert held.peak - let_go.peak == logits
    found = [round(each / 1e9, 1) for each in (let_go.bytes.total(), held.bytes.total(), let_go.peak, held.peak)]
    assert found[2:] == ([4.0, 5.2] if checkpointing else [19.7, 21.0])
    assert checkpointing or [round(each) for each in found[:2]] == [228, 231]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_operator_of_a_step_gives_an_element_for_each_token_and_word(monkeypatch, checkpointing: bool) -> None:
    """From forward to optimizer, of logits that are too many to be kept.

    All else is smaller: weights have 512 x 16 elements at most.
    """
    kernels_ext_npu.register(kernels=["CrossEntropy"])
    pieces = import_module(f"{kernels_ext_npu.load('CrossEntropy').__name__}.pieces")
    monkeypatch.setattr(pieces, "KEPT", 8 * 8 * 512 * 4 - 1)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    sizes |= {"attn_implementation": "eager"}  # that of the device holds a mask of 2048 x 2048
    config = Qwen3Config(vocab_size=512, head_dim=8, num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    ids = torch.randint(512, (8, 8)).npu()
    found = []
    for prepare in (kernels_ext_npu.kernelize, kernels_ext_npu.restore):
        model = Qwen3ForCausalLM(config).to("npu")
        prepare(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters())
        with Largest() as largest:
            model.train()(ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append(largest.elements)
    assert found[0] < ids.numel() * 512 <= found[1]
