"""The engines of torch and transformers that split the training of a model over devices. Imported in the processes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import DistributedConfig, PreTrainedModel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.modeling_layers import GradientCheckpointingLayer

import kernels_ext_npu
from tests.distributed import models
from tests.distributed.models import Tensors

Wrap = Callable[[PreTrainedModel], nn.Module]


@dataclass(frozen=True)
class Engine:
    """How a model is split: by what wraps a whole one on each device, or what transformers is told that loads shards.

    And how many different batches there are.
    """

    replicas: int
    wrap: Wrap | None = None
    config: dict[str, Any] = field(default_factory=dict)


def engine(name: str, model: str) -> Engine:
    """An engine by its name, for a model by its name."""
    world = dist.get_world_size()
    if name in _WRAPS:
        return Engine(world, _WRAPS[name])
    config = dict(_CONFIGS[name])
    # each rank of a group computes its experts for all tokens: by a plan, and from transformers 5.23 on by a name
    if name == "EP, router masking" and "ep_router" in ALL_PARALLEL_STYLES:
        router = f"model.layers.*.mlp.{'router' if model == 'gpt-oss' else 'gate'}"
        config["ep_plan"] = {router: "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
    elif name == "EP, router masking":
        config["ep_implementation"] = "all_reduce"
    return Engine(config.get("fsdp_size", 1), config=config)


def build(
    name: str,
    model: str,
    folder: Path,
    kernels: bool,
    checkpointing: str = "off",
    is_compiled: bool = False,
    is_adapted: bool = False,
) -> tuple[PreTrainedModel, nn.Module]:
    """A model from a checkpoint, and what trains it; compiled layer by layer, or under DDP as a whole."""
    chosen = engine(name, model)
    if chosen.config:
        placed: dict[str, Any] = {"distributed_config": DistributedConfig(**chosen.config)}
    else:
        placed = {"device_map": torch.device("npu", dist.get_rank())}
    whole = models.load(folder, is_adapted, use_kernels=kernels, **placed)
    if checkpointing != "off":
        whole.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    for layer in _layers(whole) if is_compiled and name != "DDP" else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    trained = chosen.wrap(whole) if chosen.wrap else whole
    return whole, torch.compile(trained, backend="aot_eager") if is_compiled and name == "DDP" else trained


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def batch(name: str, model: str, step: int) -> Tensor:
    """The rows of this process: the same for processes that share a batch."""
    replicas = engine(name, model).replicas
    share = dist.get_rank() * replicas // dist.get_world_size()
    return models.tokens(step).chunk(replicas)[share].npu()


def accumulating(model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
    """Around one of several backwards whose gradients add up, and are reduced with the last."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext()


@contextmanager
def registered(kernels: bool, everywhere: bool = False) -> Iterator[None]:
    """With or without kernels: rotary functions and the experts' default are those of the process."""
    kernels_ext_npu.unregister()
    if kernels:
        kernels_ext_npu.register(everywhere=everywhere)
    try:
        yield
    finally:
        kernels_ext_npu.unregister()


def weights(model: nn.Module) -> Tensors:
    """The whole parameters of a model by their names in the checkpoint. All processes have to call it."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {_plain(path): p.detach().cpu().clone() for path, p in model.named_parameters()}
    return {_plain(path): whole(parameter) for path, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> Tensors:
    """Their whole gradients; of those that have none there is no entry."""
    if isinstance(model, FullyShardedDataParallel):
        return _flat_gradients(model)
    taken = {path: parameter.grad for path, parameter in model.named_parameters() if parameter.grad is not None}
    if getattr(model, "gradient_as_bucket_view", False):  # DDP's: they stay parts of what it reduces
        assert all(gradient.untyped_storage().nbytes() > gradient.nbytes for gradient in taken.values())
    return {_plain(path): whole(gradient) for path, gradient in taken.items()}


def named(kind: str, tensors: Tensors) -> Tensors:
    """As `models.train` names them."""
    return {f"{kind} {name}": tensor for name, tensor in tensors.items()}


def _flat_gradients(model: nn.Module) -> Tensors:
    """FSDP1 shows weights by name and not always gradients: they take the place of the weights for a moment."""
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle]
    shards = [handle.flat_param._local_shard for handle in handles]
    before = [shard.detach().clone() for shard in shards]
    flat = [handle.flat_param for handle in handles]
    given = [p.grad if p.grad is not None else getattr(p, "_saved_grad_shard", None) for p in flat]
    with torch.no_grad():
        for shard, gradient in zip(shards, given):
            shard.zero_() if gradient is None else shard.copy_(gradient)  # a unit whose weights are frozen has none
        found = weights(model)
        for shard, weight in zip(shards, before):
            shard.copy_(weight)
    return found


def whole(tensor: Tensor) -> Tensor:
    """On the CPU, gathered from all ranks."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().float().clone()


def _plain(path: str) -> str:
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        path = path.replace(wrapper, "")
    return path.removeprefix("module.")


def _ddp(model: PreTrainedModel, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[dist.get_rank()], **options)


def _fsdp2(**options: Any) -> Wrap:
    def wrap(model: PreTrainedModel) -> nn.Module:
        for layer in _layers(model):
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    return wrap


def _hybrid(model: PreTrainedModel) -> nn.Module:
    mesh = dist.init_device_mesh("npu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return _fsdp2(mesh=mesh)(model)


def _fsdp1(**options: Any) -> Wrap:
    def wrap(model: PreTrainedModel) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(_layers(model)[0])}),
            device_id=torch.device("npu", dist.get_rank()),
            **options,
        )

    return wrap


_WRAPS: dict[str, Wrap] = {
    "DDP": _ddp,
    "DDP, gradients in buckets": partial(_ddp, gradient_as_bucket_view=True),
    "FSDP2": _fsdp2(),
    "FSDP2, hybrid": _hybrid,
    "FSDP2, bfloat16": _fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "FSDP2, offload": _fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP1": _fsdp1(use_orig_params=True),
    "FSDP1, flat": _fsdp1(use_orig_params=False),
    "FSDP1, offload": _fsdp1(use_orig_params=True, cpu_offload=CPUOffload(offload_params=True)),
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "FSDP2, by transformers": {"fsdp_size": 2},
    "TP": {"tp_plan": "auto"},
    "EP, dispatch": {"ep_size": 2, "tp_size": 2},
    "EP, router masking": {"ep_size": 2, "tp_size": 2},
    "TP × FSDP2": {"tp_size": 2, "fsdp_size": 2},
    "EP × FSDP2": {"ep_size": 2, "fsdp_size": 4},
}
