"""What runs for products of matrices, and for systems of them."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_ext_npu.measuring.inside.table import Call, Kernel, row


@row(
    "linalg_solve_triangular",
    "triangular_solve",
    source="op-plugin LinalgSolveTriangularKernelNpuOpApi.cpp; ops-math math/triangular_solve, triangular_solve.cpp",
)
def _triangular_solve(call: Call) -> Iterable[Kernel]:
    """TriangularSolve on the AI CPU, the only one there is."""
    yield call.main("TriangularSolve", on_ai_cpu=True)
