"""Check the arguments of an operator. Every refusal names the operator, what was given and the rule."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor, bfloat16, dtype, float16, float32

FLOATING = (float16, bfloat16, float32)


def require(condition: bool, operator: str, rule: str) -> None:
    """Raise ``RuntimeError``, as torch_npu does, unless the rule holds."""
    if not condition:
        raise RuntimeError(f"{operator}: {rule}")


def require_values(condition: bool, operator: str, rule: str) -> None:
    """Raise as ``require`` for a rule about what tensors hold, unless that is not known: while a graph is captured."""
    if not getattr(_thread, "values_are_unknown", False):
        require(condition, operator, rule)


@contextlib.contextmanager
def unknown_values() -> Iterator[None]:
    """Let formulas check shapes and dtypes only: their arguments hold zeros in place of what they will hold."""
    _thread.values_are_unknown = True
    try:
        yield
    finally:
        _thread.values_are_unknown = False


_thread = threading.local()


def describe(tensor: Tensor) -> str:
    """Write the dtype and shape of a tensor for an error: ``float16 [2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def require_dtypes(operator: str, allowed: set[tuple[dtype, ...]], **tensors: Tensor) -> None:
    """Raise ``RuntimeError`` unless the dtypes of the tensors, in order, are one of the allowed combinations."""
    found = tuple(tensor.dtype for tensor in tensors.values())
    if found not in allowed:
        names = ", ".join(tensors)
        options = "; ".join(", ".join(str(d).removeprefix("torch.") for d in pair) for pair in sorted(allowed, key=str))
        given = ", ".join(str(d).removeprefix("torch.") for d in found)
        require(False, operator, f"({names}) of dtypes ({given}); the device takes ({options})")
