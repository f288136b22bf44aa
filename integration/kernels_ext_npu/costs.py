"""What a computation costs, counted: launches, and the bytes that go in and out of them.

Every operator of torch and of torch_npu that moves data is a launch; views and allocations are none. Holds for real
tensors and for fake ones, whose operators only run torch_npu's meta kernels.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Cost(TorchDispatchMode):
    """Counts while the context is open.

    Attributes:
        launches: calls by operator.
        bytes: of the tensors that an operator takes and gives, by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.partition("::")[2]
        moves = any(isinstance(value, torch.Tensor) for value in tree_leaves(result))
        if operator.namespace != "prim" and moves and not _is_view(operator) and name not in ALLOCATIONS:
            self.launches[name] += 1
            tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)]
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def _is_view(operator: torch._ops.OpOverload) -> bool:
    returns = operator._schema.returns
    aliased = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    return aliased or operator._schema.name in ("aten::_unsafe_view", "aten::_reshape_alias", "aten::detach")
