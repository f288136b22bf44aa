"""Fits rates to rows: one rate after the other, by smaller and smaller steps, until no step is nearer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import product
from statistics import mean, quantiles
from typing import NamedTuple

from estimating.rows import Row, halves
from kernels_ext_npu.measuring.estimate import LINKS, PARTS, RATES, Rates, estimate

# where the search begins: the peaks, and ten microseconds for each of what is counted
START = Rates(**{rate.name: 1.0 if rate.name in PARTS else 1e-5 for rate in fields(Rates)})
# rates that are fitted to rows of their own, by the names of these
APART = {
    "attention": ("attention", "attention_kernel"),
    "collectives": (*LINKS, "collective"),
    "graph_kernels": ("graph_kernel",),
}
STEPS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)  # as parts of a rate
DIGITS = 2  # of a rate
BORDER = 1e-3  # seconds, between small and large modules


def fit_all(modules: list[Row], apart: Mapping[str, list[Row]]) -> Rates:
    """Fit all rates, to one half of the rows: those that stand apart to their own."""
    names = {name for some in APART.values() for name in some}
    rates = fit(halves(modules)[0], [rate.name for rate in fields(Rates) if rate.name not in names], START)
    for what, some in APART.items():
        rates = fit(halves(apart[what])[0], some, rates)
    return rates


def fit(rows: list[Row], names: Iterable[str], rates: Rates) -> Rates:
    """Return rates with which the mean error of rows is least, of those with these names, to two digits.

    An error is that of the logarithm, so that twice and half are as far off.
    """
    names = tuple(names)
    best = _error(rows, rates)
    for step in STEPS:
        is_nearer = True
        while is_nearer:
            is_nearer = False
            for name, factor in product(names, (1 + step, 1 / (1 + step))):
                tried = replace(rates, **{name: getattr(rates, name) * factor})
                if (error := _error(rows, tried)) < best - 1e-6:
                    rates, best, is_nearer = tried, error, True
    return replace(rates, **{name: float(f"{getattr(rates, name):.{DIGITS}g}") for name in names})


def off(row: Row, rates: Rates = RATES) -> float:
    """Return how far an estimate is from what was measured, as a part of that: 0.1 for 10% more."""
    return estimate(row.work, rates).seconds / row.seconds - 1


class Summary(NamedTuple):
    """How far estimates of so many rows are off, as parts of what was measured: in the mean, and nine of ten."""

    rows: int
    mean: float
    most: float


def summary(rows: list[Row], rates: Rates = RATES) -> Summary:
    """Return how far estimates of rows are off."""
    errors = [abs(off(row, rates)) for row in rows]
    return Summary(len(rows), mean(errors), quantiles([*errors, *errors], n=10, method="inclusive")[-1])


def spread(rows: list[Row], rates: Rates = RATES) -> float:
    """Return the factor that nine of ten rows are within, above and below."""
    factors = [math.exp(abs(math.log1p(off(row, rates)))) for row in rows]
    return quantiles(factors, n=10, method="inclusive")[-1]


def by_size(rows: list[Row]) -> dict[str, list[Row]]:
    """Split rows at a millisecond."""
    return {
        "above 1 ms": [row for row in rows if row.seconds > BORDER],
        "below": [row for row in rows if row.seconds <= BORDER],
    }


def _error(rows: list[Row], rates: Rates) -> float:
    return mean(abs(math.log(estimate(row.work, rates).seconds / row.seconds)) for row in rows)
