"""Round 16-bit sums, products and quotients with numbers where the device does, which is not always where the CPU does.

Sources: CANN's ops-math, ``aclnn_add.cpp``, ``aclnn_sub.cpp``, ``aclnn_rsub.cpp``, ``aclnn_mul.cpp`` and
``aclnn_div.cpp``, in their branches for a 910B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softnpu.float32_arithmetic import NARROW, in_float32

ARITHMETIC = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_"}


def with_numbers(op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` in a form that takes numbers beside 16-bit tensors as the device does.

    - ``add`` with ``alpha`` rounds alpha and its product if the dtype is bfloat16; float16 is added in float32.
    - ``sub`` with ``alpha`` computes in float32, ``rsub`` rounds alpha and its product.
    - ``mul`` and ``div`` round a number to float16 first, so that ``x * 70000`` is infinite. For bfloat16 they do not.
    """
    name = op._schema.name.partition("::")[2].removesuffix("_")
    wide = in_float32(op, run)

    def call(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = (self if isinstance(self, Tensor) else other).dtype
        if dtype not in NARROW or (isinstance(other, Tensor) and other.dtype != dtype):
            return run(self, other, *args, **kwargs)
        if name in ("mul", "div"):
            rounded = dtype == torch.float16 and isinstance(other, (int, float))
            return run(self, _rounded(other, dtype) if rounded else other, *args, **kwargs)
        alpha = args[0] if args else kwargs.get("alpha", 1)
        if alpha == 1:
            return run(self, other, *args, **kwargs)
        if name == "sub" or (name == "add" and dtype == torch.float16):
            other = other if isinstance(other, Tensor) else _rounded(other, dtype)
            return wide(self, other, *args, **kwargs)
        factor = _rounded(alpha, dtype)
        args, kwargs = args[1:], {key: value for key, value in kwargs.items() if key != "alpha"}
        if name == "rsub":
            return run(self * torch.tensor(factor, dtype=dtype), other, *args, **kwargs)
        if isinstance(other, Tensor):
            return run(self, other * torch.tensor(factor, dtype=dtype), *args, **kwargs)
        return run(self, _rounded(_rounded(other, dtype) * factor, dtype), *args, **kwargs)

    return call


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()
