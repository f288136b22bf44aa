"""torch.compile, checkpointed layers too, and accumulation on two processes, against one on the CPU without kernels.

Each process has half of the batch; of models that are trained the weights of two steps are compared, too.
"""

import pytest
import torch

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
    arguments = engine, model, checkpoints[model], truths[model], True, checkpointing
    for rank in two_ranks.run(comparing.compare, *arguments, compiled=True):
        comparing.assert_right(rank, model)


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_gradients_are_accumulated_before_they_are_reduced(two_ranks, checkpoints, truths, engine):
    arguments = engine, "Qwen3", checkpoints["Qwen3"], truths["Qwen3"], True
    for rank in two_ranks.run(comparing.compare, *arguments, accumulates=True):
        comparing.assert_right(rank, "Qwen3")


def test_a_compiled_model_in_tensor_parallelism_answers_as_one_process_does(two_ranks, checkpoints, truths):
    expected = torch.load(truths["Qwen3"])[0]["loss"]
    for loss in two_ranks.run(comparing.evaluate, "TP", "Qwen3", checkpoints["Qwen3"]):
        assert (loss - expected).abs() < matrix.TOLERANCE
