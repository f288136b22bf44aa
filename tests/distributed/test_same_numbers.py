"""Training with kernels on several devices gives what one process on the CPU gives without them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.distributed import comparing, matrix, models
from tests.distributed.comparing import Compared
from tests.distributed.matrix import ENGINES, FUSED, Row

pytestmark = pytest.mark.distributed

KEPT = {"gpt-oss": {("GptOssTopKRouter", "no kernel computes what its forward computes")}}
COMPARED = dict.fromkeys(model for _, model in matrix.pairs())
EVERYTHING = [pytest.param(*pair, id=" ".join(pair)) for pair in matrix.pairs()]
COUNTED = [pytest.param(*pair, id=" ".join(pair)) for pair in matrix.pairs() if matrix.is_counted(*pair)]


@dataclass
class Results:
    """What an engine made of a model: by checkpointing and rank; and without kernels, where it was run without."""

    kernels: dict[str, list[Compared]]
    without: list[Any] = field(default_factory=list)


@pytest.fixture(scope="module")
def record() -> Iterator[Callable[[Row], None]]:
    """Takes what was measured: it has to be what was recorded, or `UPDATE=1 make test-distributed` records it.

    Of what is not run the recorded rows stay.
    """
    if not matrix.RECORDS:
        yield matrix.assert_as_recorded
        return
    rows: dict[tuple[str, str, str], Row] = {}
    yield lambda row: rows.update({row.key: row})
    matrix.write(matrix.read() | rows)


@pytest.fixture(scope="module")
def results(request, checkpoints, truths) -> Callable[[str, str], Results]:
    """What an engine makes of a model. Each is trained once, for all tests."""
    known: dict[tuple[str, str], Results] = {}

    def results_of(engine: str, model: str) -> Results:
        setup = ENGINES[engine]
        if (engine, model) not in known:
            ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[setup.ranks])

            def run(kernels: bool, checkpointing: str) -> list[Compared]:
                arguments = engine, model, checkpoints[model], truths[model], kernels, checkpointing
                return ranks.run(comparing.compare, *arguments, backend=setup.backend)

            found = Results({kind: run(True, kind) for kind in matrix.checkpointings(engine, model)})
            if setup.is_bfloat16:
                found.without = run(False, "off")
            elif matrix.is_counted(engine, model):
                arguments = engine, model, checkpoints[model], False
                found.without = ranks.run(comparing.count, *arguments, backend=setup.backend)
            known[engine, model] = found
        return known[engine, model]

    return results_of


@pytest.mark.parametrize("model", COMPARED)
def test_every_gradient_is_much_larger_than_the_tolerance(model, truths):
    """So that none could be missing, or be that of half of the ranks, without being seen."""
    for step in torch.load(truths[model])[:-1]:
        for name, gradient in step.items():
            assert gradient.abs().max() > 500 * matrix.TOLERANCE, name


@pytest.mark.parametrize("model", COMPARED)
def test_every_weight_moves_much_further_than_the_tolerance(model, truths, checkpoints):
    before = dict(models.load(checkpoints[model]).named_parameters())
    for name, weight in torch.load(truths[model])[-1].items():
        assert (weight - before[name.removeprefix("weight ")]).abs().max() > 500 * matrix.TOLERANCE, name


@pytest.mark.parametrize(("engine", "model"), EVERYTHING)
def test_loss_gradients_and_weights_are_those_of_one_process(engine, model, results, record):
    """Losses and gradients of two steps, and the weights behind them."""
    if ENGINES[engine].is_bfloat16:
        for checkpointing in matrix.checkpointings(engine, model):
            record(_bfloat16(engine, model, checkpointing, results))
        return
    for checkpointing, ranks in results(engine, model).kernels.items():
        largest = {kind: max(rank.largest[kind] for rank in ranks) for kind in ("loss", "gradients", "weights")}
        for kind, (difference, where) in largest.items():
            assert difference < matrix.TOLERANCE, f"{checkpointing}: {kind} differ by {difference:.1e} in {where}"
        record(Row(engine, model, checkpointing, **{kind: value for kind, (value, _) in largest.items()}))


@pytest.mark.parametrize(("engine", "model"), EVERYTHING)
def test_fused_operators_compute(engine, model, results):
    found = results(engine, model)
    for rank in found.kernels["off"]:
        assert {(name, reason) for name, is_swapped, reason in rank.report if not is_swapped} == KEPT.get(model, set())
        for calls in (rank.calls, rank.later_calls):
            assert not FUSED[model] - calls.keys()
            assert calls["npu_rms_norm_backward"] == calls["npu_rms_norm"]
            assert not {"linalg_solve_triangular", "triangular_solve"} & calls.keys()
    for rank in found.without:
        assert not FUSED[model] & rank.calls.keys()


@pytest.mark.parametrize("model", matrix.DENSE)
def test_gate_and_up_are_one_product_where_weights_are_whole(model, results):
    for rank in results("DDP", model).kernels["off"]:
        assert not rank.report


@pytest.mark.parametrize(("engine", "model"), COUNTED)
def test_kernels_add_no_collective(engine, model, results):
    """Operator, ranks, calls and bytes of a step are what they are without kernels."""
    found = results(engine, model)
    for rank, (with_kernels, without) in enumerate(zip(found.kernels["off"], found.without)):
        assert without.sent, "an engine that sends nothing is none"
        assert with_kernels.sent == without.sent, f"rank {rank}"


@pytest.mark.parametrize(("engine", "model"), COUNTED)
def test_kernels_let_the_host_wait_no_more(engine, model, results):
    found = results(engine, model)
    for with_kernels, without in zip(found.kernels["off"], found.without):
        assert with_kernels.calls["stream_syncs"] <= without.calls["stream_syncs"]


def _bfloat16(engine: str, model: str, checkpointing: str, results) -> Row:
    """How far it is from float32, which is not much further than without kernels."""
    found = results(engine, model)
    largest = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}
    for rank, without in zip(found.kernels[checkpointing], found.without):
        for name, length in rank.relative.items():
            kind = name.partition(" ")[0]
            largest[kind] = max(largest[kind], length)
            assert length < matrix.TOLERANCES_BFLOAT16[kind], name
            if kind != "loss":
                assert length < matrix.MORE * without.relative[name], name
                assert rank.worst[name] < matrix.MORE_OF_ONE * without.worst[name], name
    return Row(engine, model, checkpointing, **largest)
