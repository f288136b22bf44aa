"""Saves and loads models in the middle of training. Runs in the processes."""

from pathlib import Path
from typing import Any

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
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

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
