"""What functions of torch that only choose or rearrange rows of logits do to the hidden states of these rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

Step = Callable[[Tensor], Tensor]


def step_of(name: str, shape: tuple[int, ...], args: tuple[Any, ...]) -> tuple[Step, tuple[int, ...]] | None:
    """Return what a function does to rows, and the shape of its result; None if it does more than that.

    Args:
        name: of the function.
        shape: of the logits, ``[..., V]``.
        args: its arguments behind the logits.

    Example: ``logits.view(-1, V)`` of ``[2, 3, V]`` is ``hidden_states.reshape(6, H)``.
    """
    if name == "__getitem__":
        return _index(shape, args[0])
    wanted = _flattened(shape, args) if name == "flatten" else _viewed(shape, args)
    if wanted is None or not wanted or wanted[-1] != shape[-1]:
        return None
    return (lambda rows: rows.reshape(*wanted[:-1], rows.shape[-1])), wanted


def _index(shape: tuple[int, ...], index: Any) -> tuple[Step, tuple[int, ...]] | None:
    """Choose rows by slices and numbers: the dimension of words has to be taken whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or (isinstance(part, (slice, int)) and not isinstance(part, bool)) for part in parts):
        return None
    given = sum(part is not Ellipsis for part in parts)
    if given > len(shape) or sum(part is Ellipsis for part in parts) > 1:
        return None
    where = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    full = (*parts[:where], *[slice(None)] * (len(shape) - given), *parts[where + 1 :])
    if full[-1] != slice(None):
        return None
    sizes = [len(range(*part.indices(size))) for part, size in zip(full, shape) if isinstance(part, slice)]
    chosen = full[:-1]
    return (lambda rows: rows[chosen]), tuple(sizes)


def _viewed(shape: tuple[int, ...], args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the shape that view or reshape gives."""
    wanted = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if not wanted or not all(isinstance(size, int) for size in wanted) or list(wanted).count(-1) > 1:
        return None
    known = math.prod(size for size in wanted if size != -1)
    if -1 in wanted and (known == 0 or math.prod(shape) % known):
        return None
    found = tuple(math.prod(shape) // known if size == -1 else size for size in wanted)
    return found if math.prod(found) == math.prod(shape) else None


def _flattened(shape: tuple[int, ...], args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the shape that flatten gives."""
    start, end = (args[0] if args else 0), (args[1] if len(args) > 1 else -1)
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    start, end = start % len(shape), end % len(shape)
    return (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]) if start <= end else None
