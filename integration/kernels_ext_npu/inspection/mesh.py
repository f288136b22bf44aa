"""A mesh of ranks without processes: transformers' own engines shard a model for the first of them."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import context_parallel
from torch.utils._python_dispatch import _disable_current_modes
from transformers import DistributedConfig, PreTrainedModel

from kernels_ext_npu.environment import first_line
from kernels_ext_npu.inspection.subject import CannotInspectError

AXES = ("tp", "fsdp", "efsdp", "ep")


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh of ranks, as transformers' DistributedConfig takes them."""

    tp: int = 1  # ranks that share each weight and a batch
    ep: int = 1  # ranks that share the experts
    # ranks, or groups of tp of them, with batches of their own, which gather each weight when they need it
    fsdp: int = 1
    cp: int = 1  # how many of the ranks that shard weights split each sequence, as torch's context_parallel does

    @property
    def ranks(self) -> int:
        """How many ranks there are: those of the experts are among them."""
        return self.tp * self.fsdp

    def __str__(self) -> str:
        sizes = [f"{name} {getattr(self, name)}" for name in ("tp", "ep", "fsdp", "cp") if getattr(self, name) > 1]
        return f"1 of {self.ranks} ranks ({', '.join(sizes)})" if sizes else "1 rank"


ONE = Mesh()


def check(mesh: Mesh) -> None:
    """Refuse sizes of a mesh that do not go together, and say which do."""
    if mesh.ep > 1 and mesh.ep % mesh.tp:
        raise CannotInspectError(
            f"--ep {mesh.ep} --tp {mesh.tp}: ranks that share experts are whole groups of tensor parallelism: give a "
            f"multiple of {mesh.tp} as --ep, or another --tp"
        )
    if mesh.ranks % mesh.ep:
        raise CannotInspectError(
            f"--ep {mesh.ep} of {mesh.ranks} ranks, --tp {mesh.tp} times --fsdp {mesh.fsdp}: their number has to be a "
            f"multiple of {mesh.ep}: give --fsdp {mesh.ep // mesh.tp}, or a multiple of it"
        )
    if mesh.fsdp % mesh.cp:
        raise CannotInspectError(
            f"--cp {mesh.cp} --fsdp {mesh.fsdp}: ranks that share rows are among those that shard weights: give a "
            f"multiple of {mesh.cp} as --fsdp"
        )


@contextmanager
def distributed(model: PreTrainedModel, mesh: Mesh) -> Iterator[defaultdict[str, tuple[str, ...]]]:
    """Shard a model on fake tensors as ``from_pretrained(distributed_config=...)`` does, outside of a FakeTensorMode.

    Gives the axes that each process group serves, by the names of the groups. They end with the context, and the model
    cannot be used after it. A model that cannot be sharded so is refused.
    """
    if mesh == ONE:
        yield defaultdict(tuple)
        return
    _check_plans(model, mesh.tp, mesh.ep)
    if mesh.fsdp > 1 and not hasattr(FSDPModule, "reset_iter_state"):
        raise CannotInspectError(f"--fsdp {mesh.fsdp} is counted with torch 2.13, not with torch {torch.__version__}")
    if dist.is_initialized():
        raise CannotInspectError("a mesh cannot be inspected in a process that is in a process group already")
    hook = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=mesh.ranks)
    try:
        served = _shard(model, mesh)
        with _unseen_propagation(), _split_rows(mesh.cp, served):
            yield served
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # it holds on to the mesh
        sys.excepthook = hook  # torch's names a rank


@contextmanager
def _split_rows(ranks: int, served: defaultdict[str, tuple[str, ...]]) -> Iterator[None]:
    """Let torch split rows between so many ranks, which serve an axis, and so do the groups that attention makes."""
    if ranks == 1:
        yield
        return
    group = dist.new_group(range(ranks))
    served.default_factory = lambda: ("cp",)
    row = torch.arange(2 * ranks, device="npu")  # torch wants to split something
    with context_parallel(DeviceMesh.from_group(group, "npu"), buffers=[row], buffer_seq_dims=[0]):
        yield


def _unseen_propagation() -> AbstractContextManager:
    """Hide the calls on fake tensors by which DTensor finds the shape of a result that is new to it.

    They are none of the model's.
    """

    def propagate(*args: Any) -> Any:
        with _disable_current_modes():
            return before(*args)

    before = ShardingPropagator._propagate_tensor_meta_non_cached
    return patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)


def remarks(model: PreTrainedModel, mesh: Mesh) -> list[str]:
    """Return what a reader of the figures of one of these ranks has to know."""
    found = []
    owners = f"groups of {mesh.tp * mesh.cp} ranks" if mesh.tp * mesh.cp > 1 else "ranks"
    if mesh.fsdp > mesh.cp:
        found.append(f"{mesh.fsdp // mesh.cp} {owners} have such inputs, each of its own")
    if mesh.cp > 1:
        found.append(
            f"each of {mesh.cp} ranks has a part of every row, as torch's context_parallel splits it; not counted: the "
            "exchange of their positions, once a forward, for which the host waits"
        )
    if mesh.ep > 1:
        found.append("routing is taken to be balanced: each expert gets as many tokens as the next, from each rank")
    if mesh.tp > 1:
        others = [p for p in model.parameters() if not _is_sharded(p, "ep")]
        size, sharded = (sum(p.numel() for p in some) for some in (others, [p for p in others if _is_sharded(p, "tp")]))
        if 2 * sharded < size:
            rules = ", ".join(model.tp_plan)
            found.append(
                f"transformers' plan of tensor parallelism shards {sharded / 1e9:.2g} of {size / 1e9:.2g} billion "
                f"parameters: {rules}"
            )
    return found


def _check_plans(model: PreTrainedModel, tp: int, ep: int) -> None:
    """Refuse a model that cannot be sharded over so many ranks, and say what can be."""
    name = type(model).__name__
    if tp > 1 and not model.tp_plan:
        raise CannotInspectError(f"--tp {tp}: {name} has no plan of tensor parallelism in transformers: use --fsdp")
    if ep > 1 and not model.ep_plan:
        raise CannotInspectError(
            f"--ep {ep}: {name} has no experts, or no plan to distribute them in transformers: use --fsdp or --tp"
        )
    if ep > 1 and "ep_dispatch_experts" not in model.ep_plan.values() and ep != tp:
        raise CannotInspectError(
            f"--ep {ep} --tp {tp}: {name} sums over the ranks of its experts, which have to be those of "
            f"tensor parallelism: give --tp {ep}, too"
        )
    _check_heads(model, tp)
    _check_experts(model, ep)


def _shard(model: PreTrainedModel, mesh: Mesh) -> defaultdict[str, tuple[str, ...]]:
    """Shard a model, and return the axes of its mesh by the names of their groups, which may serve more than one."""
    manager: Any
    _untie(model)
    try:
        wanted = DistributedConfig(tp_size=mesh.tp, ep_size=mesh.ep, fsdp_size=mesh.fsdp)
        config, _, manager = type(model).prepare_distribute_model(wanted)
        type(model).maybe_distribute_model(model, config, manager)
    except Exception as error:  # sizes or a plan that transformers refuses
        raise CannotInspectError(f"transformers does not shard it for {mesh}: {first_line(error)}") from error
    model.tie_weights()
    served: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    for axis in AXES if manager.get_mesh("ep").size() > 1 else AXES[:2]:
        group = manager.get_mesh(axis).get_group()
        if group.size() > 1:
            served[group.group_name] = (*served[group.group_name], axis)
    return served


def _untie(model: PreTrainedModel) -> None:
    """Give modules that share a parameter one each, as transformers has them until they are sharded."""
    first = dict(model.named_parameters())
    for path, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if path not in first:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, nn.Parameter(parameter.detach(), parameter.requires_grad))


def _is_sharded(parameter: nn.Parameter, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(name == axis and not p.is_replicate() for name, p in zip(names, parameter.placements))


def _check_heads(model: PreTrainedModel, ranks: int) -> None:
    heads = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and _rule(path, model.tp_plan) == "colwise":
            width = getattr(model.get_submodule(path.rpartition(".")[0]), "head_dim", None)
            if isinstance(width, int) and re.search(r"\b[qkv]_proj$", path):
                heads[path] = module.out_features // width
    for path, number in heads.items():
        if number % ranks:
            raise CannotInspectError(
                f"--tp {ranks} does not divide the {number} heads of {path}: give one of "
                f"{_divisors(math.gcd(*heads.values()))}, and --fsdp for more ranks"
            )


def _check_experts(model: PreTrainedModel, ranks: int) -> None:
    for path, parameter in model.named_parameters():
        if _rule(path, model.ep_plan) == "grouped_gemm" and parameter.shape[0] % ranks:
            raise CannotInspectError(
                f"--ep {ranks} does not divide the {parameter.shape[0]} experts of {path}: give one of "
                f"{_divisors(parameter.shape[0])}"
            )


def _rule(path: str, plan: Mapping[str, str] | None) -> str | None:
    return (plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
