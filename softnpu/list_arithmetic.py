"""Round what is computed of lists of 16-bit tensors as the device's kernels for lists do.

Source: CANN's ops-nn, foreach/*/op_kernel: of bfloat16 they compute in float32, with the number that they are given; of
float16 in float16, so that every step is rounded, the product of Axpy too (op-plugin's tests of float16 say so).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IN_FLOAT32 = {"add", "sub", "div", "pow"}
TERNARY: dict[str, Callable[..., Tensor]] = {"addcmul": torch.mul, "addcdiv": torch.div}
LISTS = {f"_foreach_{name}{place}" for name in (*IN_FLOAT32, *TERNARY) for place in ("", "_")}


def run_on_lists(op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` in a form that rounds as the device does where all tensors of its lists have one 16-bit dtype."""
    full_name = op._schema.name.partition("::")[2]
    name, in_place = full_name.removeprefix("_foreach_").removesuffix("_"), full_name.endswith("_")

    def call(*args: Any, **kwargs: Any) -> Any:
        dtypes = {t.dtype for value in args if isinstance(value, list) for t in value if isinstance(t, Tensor)}
        if dtypes == {torch.float16} and name in TERNARY:
            results = _multiplied_and_added(name, *args, **kwargs)
        elif dtypes == {torch.float16} and name in ("add", "sub") and "alpha" in kwargs:
            return run(args[0], [t * _half(kwargs["alpha"]) for t in args[1]])
        elif dtypes == {torch.bfloat16} and name in IN_FLOAT32:
            wide = [_widened(value) for value in args]
            results = run(*wide, **kwargs) or wide[0]
        else:
            return run(*args, **kwargs)
        if not in_place:
            return [result.to(*dtypes) for result in results]
        for target, result in zip(args[0], results):
            target.copy_(result)
        return None

    return call


def _multiplied_and_added(name: str, self: list, first: list, second: list, value: Any = 1, **kwargs: Any) -> list:
    """Return ``self + value · (first ∘ second)``, all steps of which are rounded; a value for each or for all."""
    values = kwargs.get("scalars", kwargs.get("value", value))
    values = values if isinstance(values, (list, Tensor)) and len(values) else [values] * len(self)
    return [x + TERNARY[name](a, b) * _half(v) for x, a, b, v in zip(self, first, second, values)]


def _half(number: Any) -> Tensor:
    return torch.as_tensor(number).half()


def _widened(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened(item) for item in value]
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
