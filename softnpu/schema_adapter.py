"""Adapt formulas to the schemas that this release of torch_npu has: parameters come and go, and results too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def adapted(op: torch._ops.OpOverload, formula: Callable) -> Callable:
    """Return the formula in a form that is called as the schema of ``op`` says.

    Formulas are written for the newest schemas. Where the release has another one, arguments are passed by name,
    with the defaults of its schema, and further results are left out.
    """
    arguments, returns = op._schema.arguments, len(op._schema.returns)
    own = [(p.name, p.default) for p in inspect.signature(formula).parameters.values()]
    given = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in arguments]
    by_position = _same(own, given)
    if by_position and returns < 2:
        return formula
    names = [name for name, _ in given]
    unknown = set(names) - {name for name, _ in own}
    defaults = {name: default for name, default in given if default is not inspect.Parameter.empty}

    @functools.wraps(formula)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not by_position:
            kwargs, args = defaults | dict(zip(names, args)) | kwargs, ()
            for name in unknown & kwargs.keys():
                if kwargs.pop(name) != defaults.get(name):
                    raise NotImplementedError(f"{op._schema.name}: the software device has no parameter {name}")
        result = formula(*args, **kwargs)
        return result[:returns] if isinstance(result, tuple) and len(result) > returns else result

    return call


def _same(own: list[tuple[str, Any]], given: list[tuple[str, Any]]) -> bool:
    """Tell whether the parameters of the schema are the first ones of the formula, with its defaults."""
    return len(given) <= len(own) and all(
        name == other and (default == value or isinstance(default, list))
        for (name, value), (other, default) in zip(own, given)
    )
