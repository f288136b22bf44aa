"""Recognise the mask functions of transformers that are bands, packed sequences and chunks.

transformers describes a mask by a function of indices, composed of functions of its module masking_utils. Such a
function is recognised by its name there, and its parameters are read from its closure.
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
class MaskStructure:
    """Describes a mask: a query sees the keys in its band, its packed sequence and its chunk.

    Attributes:
        band: which keys a query sees by distance.
        sequence_ids: ``[B, S]``, the same for tokens of one packed sequence; None where there is one.
        chunk: the number of keys in a chunk; None without chunks.
        positions: ``[B, S]``, positions within sequences by which chunks are counted; None where they are counted by
            index.
    """

    band: Band = FULL
    sequence_ids: Tensor | None = None
    chunk: int | None = None
    positions: Tensor | None = None


def recognise_mask_function(function: Callable) -> MaskStructure | None:
    """Return the structure of a mask function of transformers; None where it is more than a structure.

    For example, ``and_masks(sliding_window_overlay(4), causal_mask_function)`` is ``MaskStructure(Band(3, 0))``.
    """
    left = right = sequence_ids = chunk = positions = None
    for name, closed_over in _terms(function):
        if name == "causal_mask_function":
            right = _smaller(right, 0)
        elif name == "sliding_window_overlay":
            left = _smaller(left, closed_over["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay":
            left, right = (_smaller(limit, closed_over["sliding_window"]) for limit in (left, right))
        elif name == "packed_sequence_mask_function" and sequence_ids is None:
            sequence_ids = closed_over["packed_sequence_mask"]
        elif name == "chunked_overlay" and chunk is None:
            chunk = closed_over["chunk_size"]
        elif name == "remap_positions_for_packed_sequence" and positions is None:
            positions = closed_over["position_ids"]
        elif name != "bidirectional_mask_function":
            return None
    if any(limit is not None and limit < 0 for limit in (left, right)):
        return None
    if positions is not None and sequence_ids is None:
        return None  # only within packed sequences are differences of positions those of indices
    return MaskStructure(Band(left, right), sequence_ids, chunk, None if chunk is None else positions)


def _terms(function: Callable) -> list[tuple[str, dict[str, Any]]]:
    """Split an intersection of mask functions into their names and the variables of their closures.

    A function that maps indices to positions, as transformers 5.23 does in packed sequences, stands before the one that
    it calls with these.
    """
    if not isinstance(function, FunctionType) or function.__module__ != _MODULE:
        return [("", {})]
    name = function.__qualname__.partition(".")[0]
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    closed_over = {variable: cell.cell_contents for variable, cell in cells}
    if name == "and_masks":
        return [term for slice_queries in closed_over["mask_functions"] for term in _terms(slice_queries)]
    called = _terms(closed_over["mask_function"]) if name == "remap_positions_for_packed_sequence" else []
    return [(name, closed_over), *called]


def _smaller(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)
