"""How far results are from exact ones: one measure for whatever is compared, and what whole models may differ by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# float32 on both sides: sums in another order. A real device may multiply float32 matrices in less precision.
MODEL_BOUNDS = {True: 1e-5, False: 1e-2}
# of the largest norm, in units of the exact dtype's rounding: what is below is rounding errors of the others
NEGLIGIBLE = 128
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class DisagreementError(Exception):
    """A result is wrong. The message says which, and by how much."""


@dataclass(frozen=True)
class Distance:
    """The distance of a result from the exact one, relative to that."""

    norm: float  # the norm of the difference, divided by that of the exact result
    largest: float  # the largest single difference, divided by the largest value of the exact result
    values: int  # how many values the result has


def tensors(values: Any) -> list[Tensor]:
    """Return all tensors in some values, however they are nested."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    """Add the tensors in some values: in what operators take and give at once, in anything else as torch knows it."""
    kind = type(values)
    if isinstance(values, Tensor):
        found.append(values)
    elif kind is tuple or kind is list:
        for value in values:
            _collect(value, found)
    elif kind is dict:
        for value in values.values():
            _collect(value, found)
    elif kind not in _PLAIN:
        found += [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def distances(found: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> dict[str, Distance]:
    """Measure how far each result is from the exact one, by name.

    Names that begin with the same word are of one kind, such as gradients. What mathematics makes zero, such as the
    gradient of a key's bias, is rounding errors only, and is measured by the largest exact result of its kind.
    Where nothing was computed with a parameter, one side may have no gradient, and the other zeros.

    Raises:
        DisagreementError: something is missing, has another shape, or another choice was made.
    """
    norms: dict[str, float] = {}
    for name, tensor in exact.items():
        if tensor is not None and not _is_choice(tensor):
            norms[_kind(name)] = max(norms.get(_kind(name), 0.0), tensor.norm().item())
    return {
        name: _distance(name, found.get(name), tensor, norms.get(_kind(name), 0.0)) for name, tensor in exact.items()
    }


def distance(found: Tensor, exact: Tensor) -> Distance:
    """Measure how far one result is from the exact one; raises as `distances` does."""
    return distances({"result": found}, {"result": exact})["result"]


def worst(measured: Iterable[float]) -> float:
    """Return the largest of some distances, 0 of none; one that is no number is infinite, which max() would lose."""
    return max((math.inf if math.isnan(value) else value for value in measured), default=0.0)


def models_agree(*measured: float) -> bool:
    """Tell whether a model on this machine's device is as near to its original on the host as float32 allows."""
    import softnpu

    return worst(measured) <= MODEL_BOUNDS[softnpu.is_software()]


def _distance(name: str, found: Tensor | None, exact: Tensor | None, largest_norm: float) -> Distance:
    if exact is None:
        if found is not None and found.any():
            raise DisagreementError(f"{name} is there and should not be")
        return Distance(0.0, 0.0, 0)
    if found is None and not exact.any():
        return Distance(0.0, 0.0, exact.numel())
    if found is None or found.shape != exact.shape:
        given = "missing" if found is None else f"of shape {list(found.shape)}"
        raise DisagreementError(f"{name} is {given} and should be of shape {list(exact.shape)}")
    found = found.to(exact.device)
    if _is_choice(exact):
        if wrong := (found != exact).sum().item():
            raise DisagreementError(f"{name}: {wrong} of {exact.numel()} values are other ones")
        return Distance(0.0, 0.0, exact.numel())
    difference = found.to(_wide(exact)) - exact.to(_wide(exact))
    norm, largest = exact.norm().item(), exact.abs().max().item() if exact.numel() else 0.0
    if norm <= NEGLIGIBLE * torch.finfo(exact.dtype).eps * largest_norm:
        norm, largest = largest_norm, largest_norm / max(exact.numel(), 1) ** 0.5
    return Distance(
        difference.norm().item() / (norm or 1.0),
        (difference.abs().max().item() if exact.numel() else 0.0) / (largest or 1.0),
        exact.numel(),
    )


def _wide(exact: Tensor) -> torch.dtype:
    """Return the dtype to subtract in: an NPU has no float64."""
    wide = torch.float64 if exact.device.type == "cpu" else torch.float32
    return wide.to_complex() if exact.is_complex() else wide


def _is_choice(tensor: Tensor) -> bool:
    """Tell whether a tensor holds numbers of experts or the like, which are right or wrong."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _kind(name: str) -> str:
    return name.partition(" ")[0]
