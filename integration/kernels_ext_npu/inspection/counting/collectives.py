"""Collectives as they pass a dispatch mode: which operator, over which group, and how large its message is.

PyTorch has two families of operators. ``c10d::`` takes process groups and writes into tensors; FSDP2 and ``dist.*``
call it. ``_c10d_functional::`` takes names of groups and gives new tensors; DTensor calls it, and on a device it
becomes ``c10d::``. Fake tensors stop at the first of the two that they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group

from kernels_ext_npu.measuring.products import arguments, operator_name

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_NO_MESSAGE = ("wait_tensor", "barrier", "monitored_barrier_")
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "recv")  # functions of torch.distributed
# functional collectives that work in place on a copy
_CLONING = ("all_reduce", "all_reduce_coalesced", "broadcast")


def is_collective(operator: torch._ops.OpOverload) -> bool:
    """Tell whether an operator belongs to collectives; waiting for one does, too."""
    return operator.namespace in _NAMESPACES


def collective_name(operator: torch._ops.OpOverload) -> str | None:
    """Return the name in ``torch.distributed``; None of what sends nothing.

    Each family, and each overload, spells it in its own way.
    """
    name = operator_name(operator)
    plain = name.replace("_", "")
    known = next((each for each in _NAMES if each.replace("_", "") in plain), name.rstrip("_"))
    return None if name in _NO_MESSAGE else known


def clones(operator: torch._ops.OpOverload) -> bool:
    """Tell whether the device copies before: what is done in place is done on a copy."""
    return operator.namespace != "c10d" and operator_name(operator) in _CLONING


def axis(operator: str, served: Sequence[str]) -> str:
    """Return the axis that a collective is for, of those that its group serves.

    Experts exchange tokens, and nothing else does.
    """
    others = [axis for axis in served if (axis == "ep") == (operator == "all_to_all")]
    return next(iter([*others, *served]), "")


def group(operator: torch._ops.OpOverload, args: tuple, kwargs: dict) -> ProcessGroup:
    """Return the process group that an operator is called with, or with the name of."""
    given = arguments(operator, args, kwargs)
    value: Any = given.get("process_group", given.get("group_name"))
    if isinstance(value, str):
        return _resolve_process_group(value)  # type: ignore[arg-type]
    return ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else value
