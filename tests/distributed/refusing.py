"""What engines do not do. Runs in the processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig, PreTrainedModel

from tests.distributed import engines, models
from tests.distributed.models import Tensors


def error_of(
    act: Callable[[PreTrainedModel], object], folder: Path, config: dict[str, Any], kernels: bool = True
) -> str:
    """Return what transformers or torch say to a way to split a model, and to what is done then."""
    with engines.registered(kernels):
        try:
            act(load(folder, config, kernels))
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


def load(folder: Path, config: dict[str, Any], kernels: bool) -> PreTrainedModel:
    """Load a model that transformers splits, or a whole one onto the device of this process."""
    options = (
        {"distributed_config": DistributedConfig(**config)} if config else {"device_map": f"npu:{dist.get_rank()}"}
    )
    return models.load(folder, use_kernels=kernels, **options)


def nothing(model: PreTrainedModel) -> None:
    """Only load it."""


def forward(model: PreTrainedModel) -> None:
    model(models.tokens(0).npu())


def backward(model: PreTrainedModel) -> None:
    ids = models.tokens(0).npu()
    model(ids, labels=ids).loss.backward()


def foreach_step(model: PreTrainedModel) -> None:
    """The default AdamW."""
    backward(model)
    torch.optim.AdamW(model.parameters()).step()


def offload(model: PreTrainedModel) -> None:
    """Weights on the CPU, in a process group without a backend for it."""
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if isinstance(norm, DTensor):
        norm.full_tensor()


def split_parameters(folder: Path) -> list[str]:
    """Return the parameters of which a process has a part only under tensor parallelism."""
    with engines.registered(True):
        model = load(folder, {"tp_plan": "auto"}, True)
        return [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]


def gradients_with_whole_experts(folder: Path, kernels: bool) -> Tensors:
    """Of a step with expert parallelism over all processes, each of which has a batch of its own."""
    with engines.registered(kernels):
        model = load(folder, {"ep_size": 2, "fsdp_size": 2}, kernels)
        ids = models.tokens(0).chunk(2)[dist.get_rank()].npu()
        model(ids, labels=ids).loss.backward()
        return engines.gradients(model)
