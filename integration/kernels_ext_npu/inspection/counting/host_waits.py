"""Where the host waits for the device, besides for a value that it reads and a size that depends on values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

_MASKED = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


def of(operator: OpOverload, args: tuple, kwargs: dict, result: Any) -> int:
    """Return how often the host waits for the device in a call."""
    name = operator._schema.name.partition("::")[2]
    if name == "copy_":
        return args[0].device.type == "cpu" and args[1].device.type == "npu"
    if name == "_to_copy":
        return result.device.type == "cpu" and args[0].device.type == "npu"
    if name in _MASKED:  # for how many a mask selects
        return args[0].device.type == "npu" and has_mask(args[1])
    if name == "histc" and args[0].device.type == "npu":  # without a range op-plugin reads both ends of the data
        low, high = [*args[2:], *(kwargs.get(end, 0) for end in ("min", "max")[len(args[2:]) :])]
        return 2 * (low == high)
    return 0


def copies_in(operator: OpOverload, args: tuple, result: Any) -> bool:
    """Tell whether a call copies from the host, as making a tensor of its numbers does: no graph holds that."""
    name = operator._schema.name.partition("::")[2]
    if name == "copy_":
        return args[0].device.type == "npu" and args[1].device.type == "cpu"
    if name == "lift_fresh":  # of torch.tensor(), behind the copy
        return args[0].device.type == "npu"
    return name == "_to_copy" and result.device.type == "npu" and args[0].device.type == "cpu"


def has_mask(indices: Any) -> bool:
    """Tell whether one of these indices is a mask."""
    return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(indices) if isinstance(leaf, Tensor))
