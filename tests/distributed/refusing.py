"""What engines do not do. Runs in the processes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig

from tests.distributed import engines, models
from tests.distributed.models import Tensors


def error_of_loading(folder: Path, config: dict[str, Any]) -> str:
    """What transformers says to a way to split a model."""
    with engines.registered(True):
        try:
            models.load(folder, use_kernels=True, distributed_config=DistributedConfig(**config))
        except ValueError as error:
            return str(error)
    return ""


def split_parameters(folder: Path, config: dict[str, Any]) -> list[str]:
    """The parameters of which a process has a part only."""
    with engines.registered(True):
        model = models.load(folder, use_kernels=True, distributed_config=DistributedConfig(**config))
        return [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]


def error_of_a_foreach_step(folder: Path, kernels: bool) -> str:
    """What torch says to the default AdamW under tensor parallelism."""
    with engines.registered(kernels):
        model = models.load(folder, use_kernels=kernels, distributed_config=DistributedConfig(tp_plan="auto"))
        ids = models.tokens(0).npu()
        model(ids, labels=ids).loss.backward()
        try:
            torch.optim.AdamW(model.parameters()).step()
        except RuntimeError as error:
            return str(error)
    return ""


def error_of_offloading(folder: Path) -> str:
    """What torch says to weights on the CPU in a process group without a backend for the CPU."""
    with engines.registered(True):
        model = models.load(folder, use_kernels=True, device_map=torch.device("npu", dist.get_rank()))
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        ids = models.tokens(0).npu()
        try:
            model(ids, labels=ids).loss.backward()
            _clip(model)
        except RuntimeError as error:
            return str(error)
    return ""


def error_of_offloading_by_transformers(folder: Path) -> str:
    """What torch says to the weights that transformers loads to offload them."""
    with engines.registered(True):
        config = DistributedConfig(fsdp_size=2, fsdp_cpu_offload=True)
        model = models.load(folder, use_kernels=True, distributed_config=config)
        try:
            model(models.tokens(0).npu())
        except RuntimeError as error:
            return str(error)
    return ""


def gradients_with_whole_experts(folder: Path, kernels: bool) -> Tensors:
    """Of a step with expert parallelism over all processes, each of which has a batch of its own."""
    with engines.registered(kernels):
        config = DistributedConfig(ep_size=2, fsdp_size=2)
        model = models.load(folder, use_kernels=kernels, distributed_config=config)
        ids = models.tokens(0).chunk(2)[dist.get_rank()].npu()
        model(ids, labels=ids).loss.backward()
        return engines.gradients(model)


def _clip(model: nn.Module) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if isinstance(norm, DTensor):
        norm.full_tensor()
