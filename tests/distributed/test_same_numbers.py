"""Training with kernels on several devices gives what one process on the CPU gives without them."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed import comparing, matrix, models
from tests.distributed.comparing import Compared
from tests.distributed.matrix import ENGINES, FUSED, TOLERANCE, Row

pytestmark = pytest.mark.distributed

KEPT = {"gpt-oss": {("GptOssTopKRouter", "no kernel computes what its forward computes")}}
COMPARED = dict.fromkeys(model for _, model in matrix.pairs())
EVERYTHING = [pytest.param(*pair, id=" ".join(pair)) for pair in matrix.pairs()]


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


@pytest.mark.parametrize("model", COMPARED)
def test_gradients_and_movements_are_much_larger_than_the_tolerance(model, truths, checkpoints):
    """So that none could be missing, or be that of half of the ranks, without being seen."""
    *steps, weights = truths(model)
    before = dict(models.load(checkpoints(model)).named_parameters())
    moved = {name: weight - before[name.removeprefix("weight ")] for name, weight in weights.items()}
    for tensors in (*steps, moved):
        for name, tensor in tensors.items():
            assert tensor.abs().max() > 500 * TOLERANCE, name


@pytest.mark.parametrize(("engine", "model"), EVERYTHING)
def test_training_is_that_of_one_process(request, engine, model, checkpoints, truths, record):
    """Losses and gradients of two steps, and the weights behind them.

    Operators, ranks, calls and bytes of the collectives of a step are what they are without kernels, and the host waits
    no more.
    """
    setup = ENGINES[engine]
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[setup.ranks])

    def train(kernels: bool, checkpointing: str) -> list[Compared]:
        arguments = engine, model, checkpoints(model), truths(model), kernels, checkpointing
        return ranks.run(comparing.compare, *arguments, backend=setup.backend)

    without = train(False, "off") if matrix.is_counted(engine, model) else []
    for checkpointing in matrix.checkpointings(engine, model):
        trained = train(True, checkpointing)
        largest = _of_bfloat16(trained, without) if setup.is_bfloat16 else comparing.largest(trained, model)
        record(Row(engine, model, checkpointing, **largest))
        if checkpointing == "off":
            for rank in trained:
                _assert_computed_by_kernels(rank, engine, model)
            for rank, plain in zip(trained, without):
                assert not FUSED[model] & plain.calls.keys()
                assert plain.sent, "an engine that sends nothing is none"
                assert rank.sent == plain.sent
                assert rank.calls["stream_syncs"] <= plain.calls["stream_syncs"]


def _assert_computed_by_kernels(rank: Compared, engine: str, model: str) -> None:
    assert {(name, reason) for name, is_swapped, reason in rank.report if not is_swapped} == KEPT.get(model, set())
    for calls in (rank.calls, rank.later_calls):
        assert not FUSED[model] - calls.keys()
        assert calls["npu_rms_norm_backward"] == calls["npu_rms_norm"]
        assert not {"linalg_solve_triangular", "triangular_solve"} & calls.keys()
    if engine == "DDP" and model in matrix.DENSE:  # weights are whole: gate and up are one product
        assert not rank.report


def _of_bfloat16(ranks: list[Compared], plain: list[Compared]) -> dict[str, float]:
    """How far it is from float32, which is not much further than without kernels."""
    largest = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}
    for rank, without in zip(ranks, plain, strict=True):
        for name, length in rank.relative.items():
            kind = name.partition(" ")[0]
            largest[kind] = max(largest[kind], length)
            assert length < matrix.TOLERANCES_BFLOAT16[kind], name
            if kind != "loss":
                assert length < matrix.MORE * without.relative[name], name
                assert rank.worst[name] < matrix.MORE_OF_ONE * without.worst[name], name
    return largest
