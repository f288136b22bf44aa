"""What a model with kernels saves on several devices is what a model without them loads, on one or on several."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers.distributed.checkpoint import (
    consolidate_distributed_checkpoint,
    load_optimizer_distributed,
    save_optimizer_distributed,
)

from tests.distributed import engines, models
from tests.distributed.models import Tensors

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(engine: str, model: str, source: Path, target: Path) -> tuple[Tensors, Tensors]:
    """Train a step with kernels, save in every way that the engine has, and train another one.

    Below ``target``: ``plain`` is what torch's own functions write, ``gathered`` what save_pretrained writes, and
    where transformers splits the model, ``distributed`` and ``optimizer`` what it writes by shards.

    Returns:
        The whole weights where it was saved, and those behind the second step.
    """
    with engines.registered(True):
        whole, trained = engines.build(engine, model, source, True, "off")
        optimizer = models.optimizer_of(trained)
        _step(engine, model, trained, optimizer, 0)
        saved = engines.weights(trained)
        if engines.engine(engine, model).config:
            whole.save_pretrained(target / "distributed", distributed_checkpoint=True)
            save_optimizer_distributed(whole, optimizer, str(target / "optimizer"))
            whole.save_pretrained(target / "gathered")
        else:
            dcp.save(_state(trained, optimizer), checkpoint_id=target / "plain")
            if engine == "DDP" and dist.get_rank() == 0:
                whole.save_pretrained(target / "gathered")
        dist.barrier()
        _step(engine, model, trained, optimizer, 1)
        return saved, engines.weights(trained)


def resume(engine: str, model: str, source: Path, target: Path, kernels: bool) -> tuple[Tensors, Tensors]:
    """Load what was saved into a new model, and train the second step.

    Returns:
        The whole weights that were loaded, and those behind the step.
    """
    with engines.registered(kernels):
        if engines.engine(engine, model).config:
            whole, trained = engines.build(engine, model, target / "distributed", kernels, "off")
            optimizer = models.optimizer_of(trained)
            load_optimizer_distributed(whole, optimizer, str(target / "optimizer"))
        else:
            whole, trained = engines.build(engine, model, source, kernels, "off")
            optimizer = models.optimizer_of(trained)
            state = _state(trained, optimizer)
            dcp.load(state, checkpoint_id=target / "plain")
            set_model_state_dict(trained, state["model"])
            set_optimizer_state_dict(trained, optimizer, state["optimizer"], options=_FLAT)
        loaded = engines.weights(trained)
        _step(engine, model, trained, optimizer, 1)
        return loaded, engines.weights(trained)


def _state(trained: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(trained),
        "optimizer": get_optimizer_state_dict(trained, optimizer, options=_FLAT),
    }


def _step(engine: str, model: str, trained: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids = engines.batch(engine, model, step)
    trained(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


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
    before = ranks.run(save, engine, model, source, target)
    for kernels in (True, False):
        for (saved, uninterrupted), (loaded, resumed) in zip(
            before, ranks.run(resume, engine, model, source, target, kernels), strict=True
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
