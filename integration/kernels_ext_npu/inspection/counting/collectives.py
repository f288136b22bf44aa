"""Collectives as they pass a dispatch mode: which operator, over which group, and how large its message is.

PyTorch has two families of operators. ``c10d::`` takes process groups and writes into tensors; FSDP2 and ``dist.*``
call it. ``_c10d_functional::`` takes names of groups and gives new tensors; DTensor calls it, and on a device it
becomes ``c10d::``. Fake tensors stop at the first of the two that they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_NO_MESSAGE = ("wait_tensor", "barrier", "monitored_barrier_")
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "recv")  # of torch.distributed
_CLONING = ("all_reduce", "all_reduce_coalesced", "broadcast")  # of the second family: in place, on a copy


class Message(NamedTuple):
    """A call of a collective.

    Attributes:
        operator: the name of the operator in ``torch.distributed``.
        group: the process group of the ranks that take part.
        bytes: the size of what is reduced, gathered, scattered or exchanged as a whole, the larger side of it.
        cloned: the bytes that the device copies before.
    """

    operator: str
    group: ProcessGroup
    bytes: int
    cloned: int


def is_collective(operator: torch._ops.OpOverload) -> bool:
    """Tell whether an operator belongs to collectives; waiting for one does, too."""
    return operator.namespace in _NAMESPACES


def message(operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> Message | None:
    """Return what a call of an operator of collectives sends; None where that is nothing."""
    name = operator._schema.name.partition("::")[2]
    if name in _NO_MESSAGE:
        return None
    largest = max(_size(value) for value in (*args, *kwargs.values(), result))
    cloned = _size(result) if operator.namespace != "c10d" and name in _CLONING else 0
    return Message(_name(name), group(operator, args, kwargs), largest, cloned)


def axis(operator: str, served: Sequence[str]) -> str:
    """Return the axis that a collective is for, of those that its group serves.

    Experts exchange tokens, and nothing else does.
    """
    others = [axis for axis in served if (axis == "ep") == (operator == "all_to_all")]
    return next(iter([*others, *served]), "")


def group(operator: torch._ops.OpOverload, args: tuple, kwargs: dict) -> ProcessGroup:
    """Return the process group that an operator is called with, or with the name of."""
    given = dict(zip((argument.name for argument in operator._schema.arguments), args)) | kwargs
    value: Any = given.get("process_group", given.get("group_name"))
    if isinstance(value, str):
        return _resolve_process_group(value)  # type: ignore[arg-type]
    return ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else value


def _name(operator: str) -> str:
    """Return the name in ``torch.distributed``: each family, and each overload, spells it in its own way."""
    plain = operator.replace("_", "")
    return next((name for name in _NAMES if name.replace("_", "") in plain), operator.rstrip("_"))


def _size(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
