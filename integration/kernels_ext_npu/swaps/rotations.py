"""Rotary functions of other people's code, which are found by running them (matching/rotations_by_running.py).

Such a function is asked for cos and sin as it has them, by a call for one head, and the kernel rotates by those. They
are kept for the layers that rotate by the same tensors. A call of another kind, on another device, under
``torch.compile`` or with angles that are trained is the function's own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding import registration
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.matching.rotations_by_running import Plan, Rotation, ask, make_question


def make_forward(found: Rotation) -> FunctionType:
    """Return the forward that rotates by the kernel, for the module of a function."""
    rotate = registration.package(LAYERS["RotaryPosEmb"]).rotary_mul
    cos_and_sin = _CosAndSin(found)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        asked = None if torch.compiler.is_compiling() else _asked(found, args, kwargs)
        if asked is None:
            return found.function(*args, **kwargs)
        values, plan = asked
        tensors = values[: plan.form.rotated]
        dtypes = found.dtypes(plan, tensors[0].dtype, plan.form.tables(values)[0].dtype)
        if dtypes is None:
            return found.function(*args, **kwargs)
        tables = cos_and_sin(plan, values, dtypes.asked)
        if tables is None:
            return found.function(*args, **kwargs)
        cos, sin = tables
        results = [plan.pairing.rotate(x, cos, sin, rotate).to(dtypes.result) for x in tensors]
        return results[0] if plan.makes is Tensor else plan.makes(results)

    return forward  # type: ignore[return-value]


def _asked(found: Rotation, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Plan] | None:
    """Return the arguments of a call and what the function computes of them; None where it is to compute itself."""
    values = found.signature.values(args, kwargs)
    if values is None or not found.holds() or torch._C._are_functorch_transforms_active():
        return None
    plan = found.plan(values)
    if plan is None or values[0].device.type != "npu":
        if plan is None:
            found.left = " and ".join(str([*each.shape]) for each in values if isinstance(each, Tensor))
        return None
    tensors, tables = values[: plan.form.rotated], plan.form.tables(values)
    floats = {table.dtype for table in tables if table.is_floating_point() or table.is_complex()}
    if len(floats) > 1 or {x.dtype for x in tensors} != {values[0].dtype} or not values[0].numel():
        return None
    if plan.multiplies and torch.is_autocast_enabled("npu"):
        return None
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        return None
    return (values, plan) if all(x.device == values[0].device for x in (*tensors, *tables)) else None


# values of which the launches count, and not the bytes: to move so many takes less than to launch an operator.
# Where each layer makes angles of its own, the function takes fewer launches than the question and the kernel
_FEW = 1 << 18


class _CosAndSin:
    """Asks a function for cos and sin, and keeps the last of each tensor of angles as long as that lives."""

    def __init__(self, found: Rotation) -> None:
        self._function = found.function
        self._left: Any = None  # what was left to the function the last time
        # by what the first tensor of angles is a view of
        self._kept: dict[int, tuple[weakref.ref[Tensor], Any, list[Tensor], tuple[Tensor, Tensor]]] = {}

    def __call__(self, plan: Plan, values: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin; None for few tokens of inference that are the first to rotate by their angles."""
        tables = plan.form.tables(values)
        are_few = not torch.is_grad_enabled() and values[0].numel() < _FEW
        # a graph computes what was made in it alone; modes see operators, and those have to be the same each time
        if torch._C._len_torch_dispatch_stack() or any(map(Tensor.is_inference, tables)) or _is_capturing():
            return None if are_few else ask(self._function, plan, values, dtype, make_question)
        bases = [table if table._base is None else table._base for table in tables]
        lie = [(id(b), t._version, t.storage_offset(), t.shape, t.stride()) for b, t in zip(bases, tables)]
        key = dtype, plan, values[0].shape, lie
        kept = self._kept.get(id(bases[0]))
        if kept is None or kept[1] != key:
            if are_few and self._left != key:
                self._left = key
                return None
            with torch.inference_mode(False):
                made = ask(self._function, plan, values, dtype, _question)
            alive = weakref.ref(bases[0], functools.partial(self._forget, id(bases[0])))
            kept = self._kept[id(bases[0])] = alive, key, bases[1:], made
        return kept[3]

    def _forget(self, number: int, _: object) -> None:
        self._kept.pop(number, None)


_question = functools.lru_cache(maxsize=64)(make_question)


def _is_capturing() -> bool:
    return torch.get_device_module("npu").is_current_stream_capturing()
