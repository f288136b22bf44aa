"""What runs when elements of a tensor are picked, or put into one."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_ext_npu.measuring.inside.table import Call, Kernel, nbytes, row


@row(
    "index_copy_",
    source="ops-nn index/scatter_update/op_host/op_api/aclnn_index_copy.cpp 8.5.0:293-305 9.0.0:299-313 9.1.0:394-407",
)
def _index_copy(call: Call) -> Iterable[Kernel]:
    """One ScatterUpdate in place along the first dimension; along another one the whole tensor is transposed before it,
    and back behind it, and the new elements with it."""
    whole, new = nbytes(call.tensor("self")), nbytes(call.tensor("source"))
    if call.given["dim"] % call.tensor("self").dim() == 0:
        yield call.main("ScatterUpdate", 2 * new)
        return
    yield Kernel("Transpose", 2 * whole, workspace=whole)
    yield Kernel("Transpose", 2 * new, workspace=new)
    yield call.main("ScatterUpdate", 2 * new)
    yield Kernel("Transpose", 2 * whole, workspace=whole)
    yield Kernel("ViewCopy", 2 * whole)
