"""For how many positions a rotation does the same: what it asks of sizes, on tensors that have no values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kernels_ext_npu.recognition.rotations.forms import Form, Given

_VARIABLE = ("B", "N", "M", "S", "T")


def asked_lengths(function: Callable, form: Form) -> Callable[[int], bool] | None:
    """Return for how many positions a function does the same; None if it asks for another size.

    A function may ask whether tables are long enough. A module, which may have tables for a longer text, or angles for
    one, does the same for as many positions as give it the same answers.
    """
    shapes, symbols = ShapeEnv(), dict[Any, Any]()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # no call comes twice with the same symbols

    def fake(given: Any, value: Any) -> Any:
        if type(given) is tuple:
            return tuple(map(fake, given, value))
        if not isinstance(given, Given):
            return value
        sizes = [DimDynamic.DUCK if dim in _VARIABLE else DimDynamic.STATIC for dim in given.dims]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)  # type: ignore[arg-type]
        made = mode.from_tensor(value, symbolic_context=context)
        made_sizes: Any = made.shape
        symbols.update({size.node.expr: dim for dim, size in zip(given.dims, made_sizes) if dim in _VARIABLE})
        return made

    values = [*map(fake, form.given, form.make(form.small_sizes(), torch.float32, torch.float32))]
    with enable_python_dispatcher(), mode:  # without it torch.complex, polar and addcmul make numbers of sizes
        function(*values)
    asked = {symbols.get(symbol) for guard in shapes.guards for symbol in guard.expr.free_symbols}
    if form.width is None:
        return bool if asked <= ({"S", "T"} if form.cuts_tables else set()) else None
    conditions = [guard.expr for guard in shapes.guards]

    @functools.cache
    def holds(length: int) -> bool:
        lengths = {symbol: length for symbol, dim in symbols.items() if dim == "S"}
        return length == 1 or all(condition.subs(lengths) == True for condition in conditions)  # noqa: E712

    length = form.small_sizes()["S"]
    return holds if asked <= {"S"} and holds(length + 1) else None  # what makes a number of a size is for that alone
