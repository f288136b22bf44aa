"""What a computation costs, counted: launches, the kernels that they are on the device, the bytes that these move.

Every operator of torch and of torch_npu that moves data is a launch; views and allocations are none. What CANN does
behind it is what ``inside`` says; an operator of bitsandbytes, or of torch's ``varlen_attn``, is those that compute it.
Holds for real tensors and for fake ones, whose operators only run torch_npu's meta kernels. Waits of the host, and
memory, are counted here as well.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode

import softnpu
from kernels_ext_npu.bitsandbytes_backend import registration
from kernels_ext_npu.machine.cann_releases import parse_release
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.measuring.inside import Inside, inside
from kernels_ext_npu.measuring.products import operator_name
from softnpu.counting import STREAM_SYNCS

# allocations, a note to the allocator, and views that autograd is not told of
NO_LAUNCHES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream"),
    *("_unsafe_view", "unsafe_split"),
}
# whose result is as many elements of the first argument as it has
PICKING = {"embedding", "gather", "index", "index_select"}
# of a shape that a tensor has, or of the dtype of one
LIKE = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
# which write to their first argument, and leave unread what it was
OVERWRITING = {"copy_", "fill_", "zero_"}
# of operators that read a value on the host, or whose result has as many elements as values say
READING = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim")
)


class Cost(TorchDispatchMode):
    """A count of launches, kernels and bytes, for as long as the context is open."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()  # the number of calls by the host, by operator
        self.kernels: Counter[str] = Counter()  # the number of kernels on the device, by operator
        self.bytes: Counter[str] = Counter()  # that these read and write, by operator
        self.not_read: Counter[str] = Counter()  # those of operators of which nobody read what they do inside
        self._cann = parse_release(getattr(torch.version, "cann", None))

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if (formula := composed(operator)) is not None:
            with self:
                return formula(*args, **(kwargs or {}))
        result = operator(*args, **(kwargs or {}))
        self.count(operator, args, kwargs or {}, result)
        return result

    def count(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> Inside | None:
        """Count a call, and return what runs for it; None if it is no launch."""
        name, given = operator_name(operator), tensors(result)
        if operator.namespace == "prim" or operator.is_view or name in NO_LAUNCHES:
            return None
        if not given and not operator._schema.is_mutable:  # operators of FSDP2 write, and give nothing
            return None
        out = {argument.name for argument in operator._schema.arguments if argument.is_out}
        read = {key: value for key, value in kwargs.items() if key not in out}
        unread = _unread(name, args, kwargs, given) + self._left(name, args, kwargs, given)
        moved = byte_size((args, read, result)) - unread
        launched, times = what_runs(operator, args, kwargs)
        runs = inside(operator, args, kwargs, result, moved, self._cann)
        self.launches[launched] += times
        self.kernels[launched] += max(times, len(runs.kernels))
        self.bytes[launched] += runs.moved
        if not runs.is_read:
            self.not_read[launched] += runs.moved
        return runs

    def numbers(self, tensor: torch.Tensor) -> list[int] | None:
        """Return what a tensor on the device holds where that is known without a wait, as it is not here."""
        return None

    def _left(self, name: str, args: tuple, kwargs: dict, given: list[torch.Tensor]) -> int:
        """Return the bytes that an operator leaves where they are by what it reads on the device, where that is known.

        An indexer reads no keys of sequences without queries; routing copies no rows for experts that are not active:
        CANN's ops-transformer, ``SplitCore`` of lightning_indexer_kernel, and moe_v3_gather_out.
        """
        if name == "npu_lightning_indexer" and kwargs.get("layout_key") == "TND":
            ends, key_ends = (self.numbers(kwargs[f"actual_seq_lengths_{side}"]) for side in ("query", "key"))
            if ends is None or key_ends is None:
                return 0
            queries, keys = ([end - begin for begin, end in zip([0, *each], each)] for each in (ends, key_ends))
            read = sum(count for has_query, count in zip(queries, keys) if has_query)
            return (len(args[1]) - read) * byte_size(args[1][0])
        if name == "npu_moe_init_routing_v2" and (counts := self.numbers(given[2])) is not None:
            copied = sum(counts)
            return sum(max(0, len(rows) - copied) * rows[:1].nbytes for rows in (args[0], given[0]))
        return 0


def composed(operator: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Return the function of operators that computes one of bitsandbytes, or of torch's ``varlen_attn``, on the NPU."""
    if operator.namespace != "torch_attn":
        return registration.composed(operator)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "PrivateUse1"):
        return None
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return functools.partial(torch.library.get_kernel(operator, "PrivateUse1").call_boxed, keys)


def what_runs(operator: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[str, int]:
    """Return the name of what the device launches for an operator, and how often.

    Where torch_npu has no product by groups, a loop of products runs in its place: ``_grouped_mm_fallback`` of
    ATen/native/GroupedMMUtils.h. The host waits once before it, for the sizes of the groups.
    """
    if operator is torch.ops.aten._grouped_mm.default:
        ends = args[2] if len(args) > 2 else kwargs.get("offs")
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "PrivateUse1")
        if ends is not None and not has_kernel:
            return "mm", ends.numel()
    return operator_name(operator), 1


def byte_size(values: Any) -> int:
    """Return the bytes of all tensors in some values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(values))


def _unread(name: str, args: tuple, kwargs: dict, given: list[torch.Tensor]) -> int:
    """Return the bytes of tensors that an operator takes or gives, and leaves where they are.

    It picks some elements of a tensor, such as the rows of an embedding, or takes its shape alone. In products by
    groups no row is multiplied with the weights of experts without a token. Tokens are taken to be routed to one expert
    after the other. Of sparse attention these are the keys that no query chose, less those that are read for several.
    """
    if name == "npu_sparse_flash_attention":
        every = args[1], args[2], kwargs["key_rope"]
        rows = args[3].numel()
        read = {id(tensor): rows * tensor.shape[-1] * tensor.element_size() for tensor in every}
        return byte_size(every) - sum(read.values())
    if name in PICKING:
        return max(0, byte_size(args[:1]) - byte_size(given[:1]))
    if name == "nll_loss_forward":
        return byte_size(args[:1]) - args[1].numel() * args[0].element_size()
    if name == "nll_loss_backward":
        return byte_size(args[1:2])
    if name in LIKE:
        return byte_size(args)
    if name in OVERWRITING:
        return byte_size(args[:1])
    if name == "_grouped_mm" and args[0].dim() != args[1].dim():
        weight, rows = (args[1], len(args[0])) if args[1].dim() == 3 else (args[0], args[1].shape[1])
    elif name == "npu_grouped_matmul" and (len(args[1]) > 1 or args[1][0].dim() == 3):
        weight, rows = args[1] if len(args[1]) > 1 else args[1][0], sum(map(len, args[0]))
    else:
        return 0
    return max(0, len(weight) - rows) * byte_size(weight[0])


class Counted:
    """What was counted within a context; 0 before its end."""

    number: int = 0


@contextmanager
def host_waits() -> Iterator[Counted]:
    """Count how often the host waits: always on the software device, and on a card for operators of torch."""
    waits = Counted()
    if softnpu.is_software():
        before = softnpu.counters().get(STREAM_SYNCS, 0)
        yield waits
        waits.number = softnpu.counters().get(STREAM_SYNCS, 0) - before
        return
    with profiled_waits() as waits:
        yield waits


@contextmanager
def profiled_waits() -> Iterator[Counted]:
    """Count by torch's profiler the operators that read on the host."""
    waits = Counted()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield waits
    waits.number = sum(event.name in READING and not _is_part(event) for event in profile.events())


def _is_part(event: Any) -> bool:
    """Tell whether an operator runs within another one that reads: what came to the host is read there once more."""
    while (event := event.cpu_parent) is not None:
        if event.name in READING:
            return True
    return False


@contextmanager
def peak() -> Iterator[Counted]:
    """Count the bytes that are asked for at the peak, beyond what was held before; blocks of memory are larger.

    Collect garbage before where it would be freed in between.
    """
    torch_npu.npu.reset_peak_memory_stats()
    held, before = Counted(), _requested("current")
    yield held
    held.number = _requested("peak") - before


def _requested(when: str) -> int:
    return torch_npu.npu.memory_stats()[f"requested_bytes.all.{when}"]
