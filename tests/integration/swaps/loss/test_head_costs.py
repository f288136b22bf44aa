"""Counted: what a training step moves and holds when the head and the loss are computed together."""

from typing import Any

import pytest
from torch import Tensor, nn

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import count, count_layers
from tests.support.costs import published

MORE_BYTES = 1.06  # the logits of a piece beyond those kept are computed again, and every piece reads hidden states


def step(name: str, tokens: int, checkpointing: bool = False, with_loss: bool = True, counting: Any = count) -> Counts:
    """Count a step of a published model with all kernels, or all but CrossEntropy."""
    kernels_ext_npu.register(kernels=sorted({*REPOSITORIES} - (set() if with_loss else {"CrossEntropy"})))
    with published(name, tokens) as (model, counted):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return counted("step", counting)


def test_a_step_of_32768_tokens_with_checkpointing_holds_a_third() -> None:
    with_loss, without = (step("Qwen3-8B", 32768, checkpointing=True, with_loss=each) for each in (True, False))
    assert 3 * with_loss.peak <= without.peak
    assert with_loss.bytes.total() <= MORE_BYTES * without.bytes.total()


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
