"""What a computation costs, counted: launches, and the bytes that go in and out of them.

Every operator of torch and of torch_npu that moves data is a launch; views and allocations are none. Holds for real
tensors and for fake ones, whose operators only run torch_npu's meta kernels.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# allocations, and a note to the allocator
NO_LAUNCHES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream"}


class Cost(TorchDispatchMode):
    """A count of launches and bytes, for as long as the context is open.

    Attributes:
        launches: the number of calls, by operator.
        bytes: the bytes of the tensors that an operator takes and gives, by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.count(operator, args, kwargs or {}, result)
        return result

    def count(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> int | None:
        """Count a call, and return the bytes that it moves; None if it is no launch."""
        given = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        name = operator._schema.name.partition("::")[2]
        if (
            operator.namespace == "prim"
            or not (given or _writes(operator))
            or _is_view(operator)
            or name in NO_LAUNCHES
        ):
            return None
        taken = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in taken + given) - _unread(name, args, given)
        self.launches[name] += 1
        self.bytes[name] += moved
        return moved


def _unread(name: str, args: tuple, given: list[torch.Tensor]) -> int:
    """Return the bytes of weights that no row is multiplied with: of experts without a token, in products by groups.

    Tokens are taken to be routed to one expert after the other. The loop of products that runs in the place of
    ``_grouped_mm`` has one without rows for each of these experts.
    """
    if name == "mm" and not given[0].numel():
        return sum(tensor.numel() * tensor.element_size() for tensor in args)
    if name != "npu_grouped_matmul" or len(args[1]) > 1 or args[1][0].dim() < 3:
        return 0
    rows, weight = sum(len(x) for x in args[0]), args[1][0]
    return max(0, len(weight) - rows) * weight[0].numel() * weight.element_size()


def _writes(operator: torch._ops.OpOverload) -> bool:
    """Tell whether an operator writes into what it is given, as operators of FSDP2 do that give nothing."""
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in operator._schema.arguments
    )


def _is_view(operator: torch._ops.OpOverload) -> bool:
    returns = operator._schema.returns
    aliased = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    return aliased or operator._schema.name in ("aten::_unsafe_view", "aten::_reshape_alias", "aten::detach")
