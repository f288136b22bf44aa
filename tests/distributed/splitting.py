"""Training with sequences that somebody splits between devices, and with whole ones. Runs in the processes, too.

Each step is of the rows of `models.tokens`: as they are, with padding around each, or packed into one sequence. Loss
and gradients are the same either way.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DistributedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from kernels_ext_npu.context_parallel.collectives import Exchange, Gather, Range, Split
from tests.distributed import engines, models
from tests.distributed.models import IMAGE, LENGTH, ROWS, Tensors

# With it the gradients of one process in float32 stay within 4e-6 of float64; with 1e-2 those of gpt-oss are at 1.2e-5.
RATE = 3e-3
LABELS = ROWS * (LENGTH - 1)


def split(
    folder: Path,
    attention: str | None = None,
    layout: str = "rows",
    steps: int = 1,
    framework: str = "torch",
    is_adapted: bool = False,
    experts: int = 1,
    padding: int = 0,
    hole: bool = False,
    length: int = LENGTH,
    withheld: str = "",
    is_forward_called: bool = False,
    **more: Any,
) -> list[Tensors]:
    """Train with kernels on all processes, which have to call this together, and return what `models.train` does.

    Args:
        attention: the implementation that the model names.
        layout: ``rows``, ``padded``, of which row i begins behind i tokens of padding, or ``packed``.
        framework: who splits.
        is_adapted: whether adapters alone are trained.
        experts: how many devices share experts. Then two share rows, and FSDP2 shards the other weights over all.
        padding: how many tokens are in front of each row and behind it.
        hole: whether one between tokens is left out, too.
        length: how many tokens of each row there are.
        withheld: what torch's context parallelism needs, and the model is not given.
        is_forward_called: whether the model is not called itself.
        more: is given to the model.
    """
    with engines.registered(True, everywhere=True):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if experts > 1:
            placed: dict[str, Any] = {"distributed_config": DistributedConfig(ep_size=experts, fsdp_size=ranks)}
            mesh, rows = dist.init_device_mesh("npu", (ranks // 2, 2), mesh_dim_names=("dp", "cp")), rank // 2
            mesh = mesh["cp"]
        else:
            placed, rows = {"device_map": torch.device("npu", rank)}, 0
            mesh = dist.init_device_mesh("npu", (ranks,))
        model = models.load(folder, is_adapted, attn_implementation=attention, **placed)
        optimizer = models.make_optimizer(model, RATE)
        found: list[Tensors] = []
        for step in range(steps):
            batch = {name: tensor.npu() for name, tensor in models.given(model, step).items()}
            ids = batch.pop("input_ids")[:, :length]
            buffers = _laid_out(ids.chunk(ranks // mesh.size())[rows], layout, padding, hole)
            features = _see(model, ids, buffers, **batch) if batch else None
            with FRAMEWORKS[framework](model, attention or "sdpa", mesh, buffers) as given:
                given.pop(withheld, None)
                numbers = given.pop("images", None)
                if features is not None:
                    own = features[numbers[given["input_ids"] == IMAGE]]
                    given["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=(own,))}
                given |= {"num_items_in_batch": LABELS, "use_cache": False} | more
                loss = (model.forward if is_forward_called else model)(**given).loss
                (loss * (ranks if experts > 1 else 1)).backward()  # of which FSDP2 takes the mean
            loss = loss.detach()
            dist.all_reduce(loss)
            for parameter in model.parameters() if experts == 1 else ():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            found.append({"loss": loss.cpu()} | engines.named("gradient", engines.gradients(model)))
            optimizer.step()
            optimizer.zero_grad()
        return [*found, engines.named("weight", engines.weights(model))]


def refusal(*args: Any, **kwargs: Any) -> str:
    """Return what a step says that is refused; empty where none is."""
    try:
        split(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


# ---- what a model is given -------------------------------------------------------------------------------------------
def _see(
    model: Any, ids: Tensor, buffers: Tensors, pixel_values: Tensor, image_grid_thw: Tensor, mm_token_type_ids: Tensor
) -> Tensor:
    """Return the features of whole images, and add to what is split which of them a token stands for."""
    buffers["position_ids"] = model.model.get_rope_index(ids, mm_token_type_ids, image_grid_thw)[0]
    buffers["images"] = mm_token_type_ids.flatten().cumsum(0).view_as(ids) - 1
    return torch.cat(model.model.get_image_features(pixel_values, image_grid_thw).pooler_output)


def _laid_out(ids: Tensor, layout: str, padding: int, hole: bool) -> Tensors:
    """Return what a model is given of some rows, by name, the sequence in the last dimension."""
    positions = torch.arange(ids.shape[1], device="npu").expand(len(ids), -1)
    made = {"input_ids": ids, "shift_labels": F.pad(ids, (0, 1), value=-100)[:, 1:], "position_ids": positions}
    if layout == "padded" or padding or hole:
        made["attention_mask"] = torch.ones_like(ids)
        for name, tensor in made.items():
            sides = [(i, ROWS - i) if layout == "padded" else (padding, padding) for i in range(len(ids))]
            value = -100 if name == "shift_labels" else 0
            made[name] = torch.stack([F.pad(row, side, value=value) for row, side in zip(tensor, sides)])
        made["attention_mask"][:, 3] *= not hole
    if layout == "packed":
        made = {name: tensor.reshape(1, -1) for name, tensor in made.items()}
    return {name: tensor.contiguous().clone() for name, tensor in made.items()}


# ---- who splits ------------------------------------------------------------------------------------------------------
@contextmanager
def _torch(model: PreTrainedModel, attention: str, mesh: DeviceMesh, buffers: Tensors) -> Iterator[dict[str, Any]]:
    tensors = list(buffers.values())
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[tensor.dim() - 1 for tensor in tensors]):
        yield buffers | {"labels": buffers["input_ids"]}


@contextmanager
def _ms_swift(model: PreTrainedModel, attention: str, mesh: DeviceMesh, buffers: Tensors) -> Iterator[dict[str, Any]]:
    from swift.sequence_parallel import sequence_parallel

    model.model_info = SimpleNamespace(is_moe_model=False)  # as its loader notes
    model.model_meta = SimpleNamespace(model_arch=SimpleNamespace(language_model=None))
    is_packed = len(buffers["position_ids"]) == 1
    sequence_parallel.prepare(mesh.size(), model, SimpleNamespace(pad_token_id=0), padding_free=is_packed)
    sequence_parallel.extra_kwargs["text_position_ids"] = buffers["position_ids"].clone()
    yield buffers | _parts({"shift_labels": buffers["shift_labels"]}) | {"labels": buffers["input_ids"]}


@contextmanager
def _deepspeed(model: PreTrainedModel, attention: str, mesh: DeviceMesh, buffers: Tensors) -> Iterator[dict[str, Any]]:
    from deepspeed import comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    comm.init_distributed(dist_backend="hccl", dist_init_required=False)
    UlyssesSPAttentionHF.register_with_transformers(model, attention, mesh.size(), len(buffers["position_ids"]))
    parts = _parts(buffers)
    yield parts | {"labels": parts["input_ids"]}


@contextmanager
def _verl(model: PreTrainedModel, attention: str, mesh: DeviceMesh, buffers: Tensors) -> Iterator[dict[str, Any]]:
    from verl.models.transformers.monkey_patch import apply_monkey_patch
    from verl.utils import ulysses

    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    apply_monkey_patch(model, ulysses_sp_size=mesh.size())
    parts = _parts(buffers)
    yield parts | {"labels": parts["input_ids"]}


def _parts(tensors: Tensors) -> Tensors:
    """Return what this process has of each."""
    return {name: t.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for name, t in tensors.items()}


FRAMEWORKS: dict[str, Callable[..., AbstractContextManager[dict[str, Any]]]] = {
    "torch": _torch, "swift": _ms_swift, "deepspeed": _deepspeed, "verl": _verl,
}  # fmt: skip


# ---- messages --------------------------------------------------------------------------------------------------------
class _Messages(TorchDispatchMode):
    """Notes when something is sent, and when an operator takes what has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._arriving: set[int] = set()  # storages

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if operator.namespace == "c10d":
            self._arriving.add(given[0].untyped_storage()._cdata)
            self.events.append("sent")
        elif any(tensor.untyped_storage()._cdata in self._arriving for tensor in given):
            self.events.append("taken")
        return result


def messages_of_attention(reach: int | None, gathers: bool) -> list[list[str]]:
    """Return what happens in the exchange in front of a layer's attention, and in its gradient.

    Args:
        reach: how many keys in front of a block its queries see; None of all.
        gathers: whether keys and values are gathered; otherwise they and queries are exchanged for heads.
    """
    split, size = Split(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), is_balanced=False), 4
    tensors = [torch.ones(1, size, 2, 8, device="npu", requires_grad=True) for _ in range(2 if gathers else 3)]
    begin, end = split.rank * size, (split.rank + 1) * size
    ranges = (Range(0, 0 if reach is None else max(0, begin - reach), end),)
    with _Messages() as forward:
        results = Gather.apply(split, ranges, reach, *tensors) if gathers else Exchange.apply(split, True, *tensors)
    with _Messages() as backward:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    return [forward.events, backward.events]


def groups_of_neighbours() -> tuple[list[int], list[int]] | None:
    """Return who exchanges heads with a device of the last four, and who gathers its keys, with two neighbours each."""
    rows = dist.init_device_mesh("npu", (dist.get_world_size() // 4, 4), mesh_dim_names=("dp", "cp"))
    if rows["dp"].get_local_rank() == 0:
        return None
    mesh = rows["cp"]
    heads, keys = Split(mesh.get_group(), mesh.get_local_rank(), mesh.size(), is_balanced=True).grouped(2)
    return dist.get_process_group_ranks(heads.group), dist.get_process_group_ranks(keys.group)
