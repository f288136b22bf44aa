"""What the mask functions of transformers say: which of them are plain patterns, by what they are.

transformers describes a mask by a function of indices, which is composed of functions of its module masking_utils. A
function is known by its name there, and by what it closes over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor

from ..attention_spec import FULL, Band

_MODULE = "transformers.masking_utils"


@dataclass(frozen=True)
class Pattern:
    """Holds which keys a query sees by distance, and of which part of its sequence.

    Attributes:
        band: by distance.
        ids: ``[B, S]``, which tokens are in one sequence; None for all.
        chunk: a query sees keys of its own chunk of so many only; None for all.
        positions: ``[B, S]``, within the sequences, where chunks are of these; None where they are of places in a row.
    """

    band: Band = FULL
    ids: Tensor | None = None
    chunk: int | None = None
    positions: Tensor | None = None


def recognised(function: Callable) -> Pattern | None:
    """Return the pattern that a mask function of transformers says, None where it is none of the plain ones.

    For example, ``and_masks(sliding_window_overlay(4), causal_mask_function)`` is ``Pattern(Band(3, 0))``.
    """
    left = right = ids = chunk = positions = None
    for name, closed_over in _terms(function):
        if name == "causal_mask_function":
            right = _smaller(right, 0)
        elif name == "sliding_window_overlay":
            left = _smaller(left, closed_over["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay":
            left, right = (_smaller(limit, closed_over["sliding_window"]) for limit in (left, right))
        elif name == "packed_sequence_mask_function" and ids is None:
            ids = closed_over["packed_sequence_mask"]
        elif name == "chunked_overlay" and chunk is None:
            chunk = closed_over["chunk_size"]
        elif name == "remap_positions_for_packed_sequence" and positions is None:
            positions = closed_over["position_ids"]
        elif name != "bidirectional_mask_function":
            return None
    if any(limit is not None and limit < 0 for limit in (left, right)):
        return None
    if positions is not None and ids is None:
        return None  # positions count on within a sequence alone, where distances are those of places
    return Pattern(Band(left, right), ids, chunk, None if chunk is None else positions)


def _terms(function: Callable) -> list[tuple[str, dict[str, Any]]]:
    """Split a mask function into those that it is the intersection of: their names, and what they close over.

    One that is asked of positions, as transformers 5.23 does in packed sequences, stands before what it asks.
    """
    if not isinstance(function, FunctionType) or function.__module__ != _MODULE:
        return [("", {})]
    name = function.__qualname__.partition(".")[0]
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    closed_over = {variable: cell.cell_contents for variable, cell in cells}
    if name == "and_masks":
        return [term for part in closed_over["mask_functions"] for term in _terms(part)]
    asked = _terms(closed_over["mask_function"]) if name == "remap_positions_for_packed_sequence" else []
    return [(name, closed_over), *asked]


def _smaller(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)
