"""What runs for tensors that are written to where they lie: caches, single elements, and what an optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_ext_npu.measuring.inside.table import Call, Kernel, nbytes, row


@row(
    "scatter_update_",
    source="op-plugin ScatterUpdateKernelNpuOpApi.cpp; ops-nn index/scatter/…/aclnn_scatter_update.cpp 8.5.0:145-160, "
    "`aclnnInplaceScatterUpdate` of 9.0.0 and 9.1.0 alike",
)
def _scatter_update(call: Call) -> Iterable[Kernel]:
    """Scatter, which moves the new elements alone, along any dimension."""
    yield _written_alone(call, "Scatter")


@row(
    "npu_scatter_nd_update_",
    source="op-plugin ScatterNdUpdateKernelNpuOpApi.cpp; ops-nn index/scatter_nd_update/…/aclnn_scatter_nd_update.cpp "
    "8.5.0:106-123 9.1.0:183-240",
)
def _scatter_nd_update(call: Call) -> Iterable[Kernel]:
    """ScatterNdUpdate, which moves the new elements alone."""
    yield _written_alone(call, "ScatterNdUpdate")


def _written_alone(call: Call, kernel: str) -> Kernel:
    return call.main(kernel, 2 * nbytes(call.given["updates"]) + nbytes(call.given["indices"]))


@row(
    "npu_apply_adam_w",
    source="op-plugin ApplyAdamWKernelNpuOpApi.cpp; ops-nn optim/apply_adam_w/op_api/aclnn_apply_adam_w.cpp "
    "8.5.0:177-214 9.1.0:177-214",
)
def _apply_adam_w(call: Call) -> Iterable[Kernel]:
    """ApplyAdamW, which reads and writes the parameter and its two averages, and reads the gradient."""
    yield call.main("ApplyAdamW", nbytes(call.given["grad"]) + 2 * sum(map(nbytes, call.results)))
