"""Whether two ways of computing a call agree: both are held against the original in float32.

bfloat16 and float16 round every result, and whoever has fewer or other steps in between rounds at other places: two
correct results differ, and neither is the truth. Float32 has 16 or 13 bits more, and is that for this purpose. So a
result may be twice as far from it as the original is; or, where the original happens to be nearer than that, as far as
one rounding can bring it. A wrong formula is off by a hundred times as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2
# of the largest single difference, which is a matter of luck
FACTOR_OF_LARGEST = 4
# with fewer values than this the norm is a matter of luck too, and the original's worst tensor is the measure
FEW = 64
RULE = (
    "Outputs and gradients are compared with the original in float32, by the norm of the difference and by the largest "
    f"single one: {FACTOR} and {FACTOR_OF_LARGEST} times what the original differs are allowed, or one rounding of the "
    f"dtype where that is more; the norm of a bias's gradient may differ by {FACTOR_OF_LARGEST} times, and a "
    f"tensor of fewer than {FEW} values as the original's worst does. What differs by more is refused."
)


class DisagreementError(Exception):
    """A result is wrong. The message says which, and by how much."""


@dataclass(frozen=True)
class Distance:
    """The distance of a result from the exact one, relative to that.

    Attributes:
        norm: the norm of the difference, divided by that of the exact result.
        largest: the largest single difference, divided by the largest value of the exact result.
        values: how many values the result has.
    """

    norm: float
    largest: float
    values: int


Distances = dict[str, Distance]


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> Distances:
    """Measure how far each output and gradient is from the exact one, by name.

    Raises:
        DisagreementError: something is missing, has another shape, or another choice was made.
    """
    # what mathematics makes zero, such as the gradient of a key's bias, is rounding errors only
    floors = {name: 1e-3 * value for name, value in _largest(exact).items()}
    measured = {}
    for name, reference in exact.items():
        result = found.get(name)
        if result is None or result.shape != reference.shape:
            given = "missing" if result is None else f"of shape {list(result.shape)}"
            raise DisagreementError(f"{name} is {given} and should be of shape {list(reference.shape)}")
        if not reference.is_floating_point():
            wrong = (result != reference).sum().item()
            if wrong:
                raise DisagreementError(f"{name}: {wrong} of {reference.numel()} values are other ones")
            continue
        difference, floor = result.float() - reference, floors[_family(name)]
        measured[name] = Distance(
            (difference.norm() / reference.norm().clamp(min=floor)).item(),
            (difference.abs().max() / reference.abs().max().clamp(min=floor / reference.numel() ** 0.5)).item(),
            reference.numel(),
        )
    return measured


def check(found: Distances, original: Distances, dtype: torch.dtype) -> None:
    """Raise DisagreementError if a result is further away than it may be."""
    rounding = torch.finfo(dtype).eps / 2
    for name, distance in found.items():
        measures = original.values() if distance.values < FEW else [original[name]]
        # a sum over all tokens: of a key's bias it nearly cancels, and what remains are the roundings of its terms
        factor_of_norm = FACTOR_OF_LARGEST if name.endswith("bias") else FACTOR
        for what, factor in ("norm", factor_of_norm), ("largest", FACTOR_OF_LARGEST):
            value = getattr(distance, what)
            allowed = max(rounding, *(factor * getattr(measure, what) for measure in measures))
            if not value <= allowed:  # NaN is not
                of = "" if what == "norm" else " in its largest difference"
                raise DisagreementError(f"{name} is {value:.1e} away from float32{of}, and {allowed:.1e} is allowed")


def _family(name: str) -> str:
    return "gradient" if name.startswith("gradient") else "output"


def _largest(exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest norm among the outputs, and the largest among the gradients."""
    norms: dict[str, float] = {}
    for name, value in exact.items():
        if value.is_floating_point():
            norms[_family(name)] = max(norms.get(_family(name), 0.0), value.norm().item())
    return norms
