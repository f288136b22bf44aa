"""torch.compile, accumulation, adapters, and kernels that come behind an engine, against one process on the CPU.

Each of two processes has half of the batch; two steps are compared, the weights behind them and an evaluation between.
"""

import pytest

from tests.distributed import comparing, matrix

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("engine", "model", "checkpointing"),
    [
        ("FSDP2", "Qwen3", "off"),
        ("FSDP2", "Gemma 3", "off"),
        ("FSDP2", "Qwen3-MoE", "off"),
        ("FSDP2", "Qwen3", "non-reentrant"),
        ("FSDP2", "Qwen3", "reentrant"),
        ("DDP", "Qwen3", "off"),
        ("TP", "Qwen3", "off"),
    ],
)
def test_compiled_models_train_as_one_process_does(two_ranks, checkpoints, truths, engine, model, checkpointing):
    arguments = engine, model, checkpoints(model), truths(model), True, checkpointing
    for rank in two_ranks.run(comparing.compare, *arguments, is_compiled=True):
        comparing.assert_right(rank, model)


@pytest.mark.parametrize("engine", ["DDP", "DDP, gradients in buckets", "FSDP2", "FSDP1", "FSDP1, flat"])
@pytest.mark.parametrize("model", ["Qwen3", "Gemma 3"])
def test_kernels_that_come_behind_an_engine_lay_out_what_is_theirs_alone(two_ranks, checkpoints, truths, model, engine):
    """Gate and up are packed rightly, or not at all."""
    arguments = engine, model, checkpoints(model), truths(model)
    for rank in two_ranks.run(comparing.compare, *arguments, is_late=True):
        comparing.assert_right(rank, model)
        assert not (engine.startswith("DDP") and rank.report)


@pytest.mark.parametrize("engine", ["DDP", "DDP, gradients in buckets", "FSDP2"])
def test_accumulated_gradients_of_adapters_train_as_one_process_does(two_ranks, checkpoints, truths, engine):
    truth = truths("Qwen3", is_adapted=True)
    arguments = engine, "Qwen3", checkpoints("Qwen3"), truth
    assert all(each.abs().max() > 100 * matrix.TOLERANCE for step in truth[:-1] for each in step.values())
    for rank in two_ranks.run(comparing.compare, *arguments, accumulates=True, is_late=True, is_adapted=True):
        comparing.assert_right(rank, "Qwen3")
        assert rank.projections["one node with q_proj, k_proj, v_proj"] == 6  # in two layers
        assert not rank.calls["matmul_backward"]
