"""Counted: what published models launch, move and hold at their sizes, with kernels, and without some of them."""

from collections.abc import Callable
from functools import cache, partial
from math import inf
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import count, count_layers
from tests.support.costs import published

MORE_BYTES = 1.06  # the logits of a piece beyond those kept are computed again, and every piece reads hidden states
Prepare = Callable[[PreTrainedModel], object]


@cache
def counted(
    name: str,
    *without: str,
    phase: str = "step",
    tokens: int = 4096,
    prepare: Prepare = kernels_ext_npu.kernelize,
    counting: Callable[..., Counts] = count,
) -> Counts:
    """Count a phase of a model with all kernels but some."""
    kernels_ext_npu.register(kernels=sorted({*REPOSITORIES} - {*without}))
    with published(name, tokens, prepare) as (_, counts):
        return counts(phase, counting)


def checkpointed(model: PreTrainedModel) -> None:
    kernels_ext_npu.kernelize(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})


def adapted(dropout: float, model: PreTrainedModel) -> None:
    subject.adapt(model, 16, dropout)
    kernels_ext_npu.kernelize(model.train())


@pytest.mark.parametrize(
    ("name", "launches", "gigabytes", "peak", "peak_with_loss"),
    [
        ("Qwen3-8B", (595, 1650), (72, 259), 24.7, 20.5),
        pytest.param("Gemma-3-12B", (1465, 3070), (124, 459), 41.9, 34, marks=pytest.mark.long),
        pytest.param("gpt-oss-20b", (620, 2290), (83, 540), 21.5, 15, marks=pytest.mark.long),
    ],
)
def test_whole_models_cost_no_more_than_this(name, launches, gigabytes, peak, peak_with_loss) -> None:
    """The launches are what a prototype of one a layer was counted with, and some more; bytes are those of all kernels.

    Without the loss of CrossEntropy, which launches more operators, a few for each chunk of tokens, to hold less; and a
    step with it moves hardly more.
    """
    forward, step = (counted(name, "CrossEntropy", phase=phase) for phase in ("forward", "step"))
    for counts, most, bytes_moved in zip((forward, step), launches, gigabytes, strict=True):
        assert counts.launches.total() <= most
        assert counts.bytes.total() / 1e9 <= bytes_moved
        assert counts.waits == 0
    with_loss = counted(name)
    assert step.peak / 1e9 <= peak
    assert with_loss.peak / 1e9 <= peak_with_loss
    assert with_loss.bytes.total() <= MORE_BYTES * step.bytes.total()
    assert with_loss.waits == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "launches", "gigabytes", "peak"),
    [("Qwen3-Next-80B-A3B", (10_200, 21_700), 844, 49), ("kimi_linear", (7_300, 16_200), 1_049, 34)],
)
def test_models_with_linear_attention_stay_below_these_figures(name, launches, gigabytes, peak) -> None:
    """As they are counted, with what is inside of operators, rounded up.

    A chunk's product and sum are two launches: as one it would copy what it adds to.
    The gigabytes are apart from products with experts, which have their own limit: they read the weights of all experts
    twice and write their gradients, whatever linear attention does.
    """
    forward, step = (counted(name, phase=phase) for phase in ("forward", "step"))
    assert [counts.launches.total() <= most for counts, most in zip((forward, step), launches)] == [True] * 2
    expert_bytes = step.bytes["npu_grouped_matmul"]
    assert expert_bytes <= 540e9
    assert step.bytes.total() - expert_bytes <= gigabytes * 1e9
    assert step.peak <= peak * 1e9
    assert not step.on_ai_cpu
    assert step.waits == forward.waits == 0


def test_a_step_of_32768_tokens_with_checkpointing_holds_a_third() -> None:
    long_prompt = partial(counted, "Qwen3-8B", tokens=32768, prepare=checkpointed)
    with_loss, without = long_prompt(), long_prompt("CrossEntropy")
    assert 3 * with_loss.peak <= without.peak
    assert with_loss.bytes.total() <= MORE_BYTES * without.bytes.total()


def count_holding(phase: str, model: nn.Module, inputs: dict[str, Tensor], values: KnownValues, soc: Any) -> Counts:
    """Count a step of a loop that holds the output of the model."""

    def run(_: Any) -> None:
        outputs = model.train()(**inputs)
        outputs.loss.backward()
        model.zero_grad(set_to_none=True)

    return count_layers(model, inputs, lambda: Counting(values, soc, None), run)


@pytest.mark.parametrize("prepare", [kernels_ext_npu.kernelize, checkpointed])
def test_holding_the_output_costs_one_product_and_its_result(prepare: Prepare) -> None:
    """As docs/recipes.md says: hidden states and weight are read once more, logits of two bytes written and held."""
    tokens, words, width = 4096, 151_936, 4096
    held, let_go = (counted("Qwen3-8B", prepare=prepare, counting=each) for each in (count_holding, count))
    logits = 2 * tokens * words
    assert held.launches - let_go.launches == {"matmul": 1}
    assert held.bytes.total() - let_go.bytes.total() == logits + 2 * width * (tokens + words)
    assert held.peak - let_go.peak == logits
    found = [round(each / 1e9, 1) for each in (let_go.bytes.total(), held.bytes.total(), let_go.peak, held.peak)]
    assert found[2:] == ([4.0, 5.2] if prepare is checkpointed else [19.7, 21.0])
    assert prepare is checkpointed or [round(each) for each in found[:2]] == [240, 242]


@pytest.mark.long
@pytest.mark.parametrize(("dropout", "most"), [(0.0, (1.5, 0.61, 0.6)), (0.05, (inf, 0.96, 0.7))])
def test_a_step_with_adapters_moves_less(dropout: float, most: tuple[float, float, float]) -> None:
    """Nothing large is cast, and layers of one input are one node; of dropout masks are kept, and not what is left.

    The bytes are those of all kernels, as they are counted, rounded up.
    """
    adapted_counts = partial(counted, "Qwen3-8B", "CrossEntropy", prepare=partial(adapted, dropout))
    counts, before = adapted_counts(), adapted_counts("Linear")
    assert counts.launches.total() <= most[0] * before.launches.total()
    assert counts.bytes.total() <= most[1] * before.bytes.total()
    assert counts.peak <= most[2] * before.peak
