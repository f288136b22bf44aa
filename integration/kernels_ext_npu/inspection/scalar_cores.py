"""Launches that CANN leaves to its AI CPU, a few scalar cores beside those for matrices and vectors.

Neither their number nor their bytes say what they take, and no roofline holds for them.
"""

from __future__ import annotations

from kernels_ext_npu.inspection.counts import Counts

# op-plugin calls aclnnTriangularSolve for both, which has an implementation for the AI CPU alone: CANN, ops-math,
# triangular_solve.cpp.
OPERATORS = ("linalg_solve_triangular", "triangular_solve")


def launches(counts: Counts) -> dict[str, int]:
    """Return how many launches run on the AI CPU, by operator; without those that have none."""
    return {name: counts.launches[name] for name in OPERATORS if counts.launches[name]}
