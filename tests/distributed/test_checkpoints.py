"""What a model with kernels saves on several devices is what a model without them loads, on one or on several."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers.distributed.checkpoint import consolidate_distributed_checkpoint

from tests.distributed import checkpointing, models
from tests.distributed.models import Tensors

pytestmark = pytest.mark.distributed

BY_TORCH = [("DDP", "Qwen3"), ("DDP", "Llama"), ("FSDP1", "Gemma 3"), ("FSDP2", "Qwen3")]
# experts in one tensor lie in strips under tensor parallelism, and whole under expert parallelism
BY_TRANSFORMERS = [
    ("FSDP2, by transformers", "Qwen3"),
    ("TP", "Llama"),
    ("TP", "Qwen3-MoE"),
    ("EP, dispatch", "gpt-oss"),
]


@pytest.mark.parametrize(("engine", "model"), BY_TORCH)
def test_a_checkpoint_of_torch(engine, model, two_ranks, checkpoints, tmp_path):
    """Gate and up of these models are packed where they are not sharded: DDP's."""
    saved = _resumes(two_ranks, engine, model, checkpoints[model], tmp_path)
    plain = models.load(checkpoints[model])
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    plain.load_state_dict(state["model"])
    _assert_equal(_weights(plain), saved)
    if engine == "DDP":
        _assert_equal(_weights(models.load(tmp_path / "gathered")), saved)


@pytest.mark.parametrize(("engine", "model"), BY_TRANSFORMERS)
def test_a_checkpoint_of_transformers(engine, model, two_ranks, checkpoints, tmp_path):
    saved = _resumes(two_ranks, engine, model, checkpoints[model], tmp_path)
    _assert_equal(_weights(models.load(tmp_path / "gathered")), saved)
    consolidate_distributed_checkpoint(tmp_path / "distributed", tmp_path / "consolidated")
    for file in (tmp_path / "gathered").glob("*.json"):
        if "index" not in file.name:
            (tmp_path / "consolidated" / file.name).write_bytes(file.read_bytes())
    _assert_equal(_weights(models.load(tmp_path / "consolidated")), saved)


def _resumes(ranks, engine: str, model: str, source: Path, target: Path) -> Tensors:
    """Training goes on where it was, with kernels and without. Returns the weights that were saved."""
    before = ranks.run(checkpointing.save, engine, model, source, target)
    for kernels in (True, False):
        for (saved, uninterrupted), (loaded, resumed) in zip(
            before, ranks.run(checkpointing.resume, engine, model, source, target, kernels), strict=True
        ):
            _assert_equal(loaded, saved)
            if kernels:
                _assert_equal(resumed, uninterrupted)
            for name, weight in uninterrupted.items():  # it did go on
                assert not torch.equal(weight, saved[name]), name
    return before[0][0]


def _weights(model: torch.nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _assert_equal(one: Tensors, other: Tensors) -> None:
    """To the bit: the same operators compute the same."""
    assert one.keys() == other.keys()
    different = [name for name, weight in one.items() if not torch.equal(weight, other[name])]
    assert not different
