"""A step of training with sequences that somebody splits between devices. Runs in the processes.

The rows of `models.tokens`, or the same packed into one sequence: either way loss and gradients are those of
`models.train`.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.swaps.attention.shared_sequences import Exchange, Gather, Range, Split
from tests.distributed import models
from tests.distributed.models import LENGTH, ROWS, Tensors

Enter = Callable[[PreTrainedModel, str, Tensor], bool]


def step(
    framework: str,
    folder: Path,
    attention: str | None,
    packed: bool = False,
    withheld: str = "",
    padding: int = 0,
    hole: bool = False,
    length: int = LENGTH,
    is_forward_called: bool = False,
    **more: Any,
) -> Tensors:
    """Train a step with kernels, and sum loss and gradients of all processes, which have to call this together.

    Args:
        framework: who splits.
        folder: of the checkpoint.
        attention: the implementation that the model names.
        packed: whether the rows are one sequence.
        withheld: what torch's context parallelism needs and the model is not given.
        padding: how many tokens of padding there are in front of each row, and as many behind it.
        hole: whether there is padding between tokens, too.
        length: how many tokens of each row there are.
        is_forward_called: whether the forward is called, and not the model.
        more: what else the model is given.
    """
    kernels_ext_npu.register(everywhere=True)
    try:
        model = models.load(folder, attn_implementation=attention, device_map=torch.device("npu", dist.get_rank()))
        batch = _batch(packed, length)
        ids, labels, positions, mask = (F.pad(t, (padding, padding), value=fill) for t, fill in batch)
        given = {"position_ids": positions, "labels": ids, "shift_labels": labels}
        given |= {"num_items_in_batch": ROWS * (LENGTH - 1), "use_cache": False}
        if padding or hole:
            mask[:, 3] *= not hole
            given["attention_mask"] = mask
        given |= more
        given.pop(withheld, None)
        if framework == "torch":
            mesh = dist.init_device_mesh("npu", (dist.get_world_size(),))
            with context_parallel(mesh, buffers=[ids, labels, positions, mask], buffer_seq_dims=[1] * 4):
                loss = (model.forward if is_forward_called else model)(ids, **given).loss
                loss.backward()
        else:
            splits_itself = FRAMEWORKS[framework](model, attention or "sdpa", positions)
            own = ["shift_labels"] if splits_itself else ["shift_labels", "labels", "position_ids"]
            given |= {name: given[name].chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for name in own}
            loss = model(input_ids=ids if splits_itself else given["labels"], **given).loss
            loss.backward()
        found = {"loss": loss.detach()} | {f"gradient {path}": p.grad for path, p in model.named_parameters()}
        for tensor in found.values():
            dist.all_reduce(tensor)
        return {name: tensor.cpu() for name, tensor in found.items()}
    finally:
        kernels_ext_npu.unregister()


def error_of_step(*args: Any, **kwargs: Any) -> str:
    """Return what a step says that is refused; empty where none is."""
    try:
        step(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


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


def _batch(packed: bool, length: int) -> list[tuple[Tensor, int]]:
    """Return tokens, labels, positions and what is no padding, each with what it is where there is padding."""
    ids = models.tokens(0)[:, :length]
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(length).expand(ROWS, -1)
    shape = (1, -1) if packed else (ROWS, length)
    tensors = (ids, labels, positions, torch.ones_like(ids))
    return [(tensor.reshape(shape).contiguous().npu(), fill) for tensor, fill in zip(tensors, (0, -100, 0, 0))]


# ---- frameworks: each returns whether it splits what the model is given --------------------------------------------
def _ms_swift(model: PreTrainedModel, attention: str, positions: Tensor) -> bool:
    from swift.sequence_parallel import sequence_parallel

    model.model_info = SimpleNamespace(is_moe_model=False)  # as its loader notes
    model.model_meta = SimpleNamespace(model_arch=SimpleNamespace(language_model=None))
    is_packed = len(positions) == 1
    sequence_parallel.prepare(dist.get_world_size(), model, SimpleNamespace(pad_token_id=0), padding_free=is_packed)
    sequence_parallel.extra_kwargs["text_position_ids"] = positions.clone()
    return True


def _deepspeed(model: PreTrainedModel, attention: str, positions: Tensor) -> bool:
    from deepspeed import comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    comm.init_distributed(dist_backend="hccl", dist_init_required=False)
    UlyssesSPAttentionHF.register_with_transformers(model, attention, dist.get_world_size(), len(positions))
    return False


def _verl(model: PreTrainedModel, attention: str, positions: Tensor) -> bool:
    from verl.models.transformers.monkey_patch import apply_monkey_patch
    from verl.utils import ulysses

    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    apply_monkey_patch(model, ulysses_sp_size=dist.get_world_size())
    return False


FRAMEWORKS: dict[str, Enter] = {"swift": _ms_swift, "deepspeed": _deepspeed, "verl": _verl}
