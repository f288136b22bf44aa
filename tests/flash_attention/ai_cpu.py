"""Which operators of torch a 910B computes on an AI CPU, by the dtype that they compute in.

A launch there takes some hundred microseconds: ops-nn, aclnn_index_add.cpp, of a sort. The dtypes of the vector cores
are the lists for 910B in CANN's ops-math and ops-nn, 8.5.0 to 9.1.0, in op_api of: cumsum.cpp, floordiv.cpp,
gather_elements.cpp and gather_elements_v2.cpp, scatter_elements.cpp, sort.cpp, topk.cpp, masked_fill.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FLOATING = {torch.float32, torch.float16, torch.bfloat16}
_VECTOR_CORE_OPERATORS = {
    "cumsum": {*_FLOATING, torch.int32},
    "floor_divide": {*_FLOATING, torch.int32, torch.int8, torch.uint8},
    "gather": {*_FLOATING, torch.int32},  # of others small ones alone
    "masked_fill": {*_FLOATING, torch.int32, torch.int8, torch.bool},
    "scatter": {*_FLOATING, torch.int32, torch.int8, torch.uint8},
    "sort": _FLOATING,
    "topk": _FLOATING,
}


class OnAiCpu(TorchDispatchMode):
    """Notes the calls that would be computed there, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        if name in _VECTOR_CORE_OPERATORS and args[0].device.type == "npu":
            dtype = result.dtype if isinstance(result, Tensor) else args[0].dtype  # sums and quotients are promoted
            if dtype not in _VECTOR_CORE_OPERATORS[name]:
                self.found.append(f"{name} of {dtype}")
        return result
