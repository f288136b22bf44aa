"""What runs when elements of a tensor are picked, or put into one."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import HALF, Call, Kernel, cast, nbytes, one_kernel, row

_ADDED_IN_WORDS = (torch.float32, *HALF, torch.int32, torch.int8, torch.uint8)


@row(
    "index_copy_",
    source="ops-nn index/scatter_update/op_host/op_api/aclnn_index_copy.cpp 8.5.0:231-312 9.0.0:262-320 9.1.0:353-414",
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
    yield Kernel("Transpose", 2 * whole)


one_kernel(
    "embedding",
    kernel="GatherV2",
    source="ops-nn index/embedding/op_api/aclnn_embedding.cpp 8.5.0:212-265 9.0.0:251-304 9.1.0:251-298",
)
one_kernel(
    "index_select",
    kernel="GatherV3",
    source="ops-nn index/gather_v2/op_api/aclnn_index_select.cpp 8.5.0:164-222 9.x:166-224",
)


@row(
    "embedding_dense_backward",
    source="ops-nn index/embedding_dense_grad_v2/op_api/aclnn_embedding_dense_backward.cpp 8.5.0:230-409 9.x:230-420",
)
def _embedding_backward(call: Call) -> Iterable[Kernel]:
    """EmbeddingDenseGradV2, before it a cast of the numbers of rows to int32, and for rows of more than 512 elements a
    Sort of these and, from CANN 9.0 on, ZerosLike of the result. Gradients of 16 bits are cast to float32, and the
    result back, where both take less than 100 MiB or fewer than 512 rows come in."""
    grad, indices, result = call.tensor("grad_output"), call.tensor("indices"), call.result
    rows, width = indices.numel(), grad.shape[-1]
    is_small = 2 * (grad.numel() + result.numel()) < 100 * 2**20 or rows < 512 or call.given["scale_grad_by_freq"]
    dtype = torch.float32 if is_small else grad.dtype
    yield from cast(grad, dtype)
    yield from cast(indices, torch.int32)
    is_cast, whole, added = result.dtype is not dtype, nbytes(result, dtype), nbytes(grad, dtype)
    moved = 2 * added + whole
    if width > 512 or result.shape[0] > 2**24:
        yield Kernel("Sort", 12 * rows, workspace=8 * rows)
        if call.cann >= (9, 0):
            yield Kernel("ZerosLike", whole)
            moved = 3 * added  # rows that are added to are read and written
    yield call.main("EmbeddingDenseGradV2", moved + 8 * rows, workspace=whole * is_cast)
    if is_cast:
        yield Kernel("Cast", whole + nbytes(result))


@row("gather", source="ops-nn index/gather_elements_v2/op_host/op_api/aclnn_gather.cpp 8.5.0:220-355 9.x:220-366")
def _gather(call: Call) -> Iterable[Kernel]:
    """One GatherElementsV2 with a cast of the places to int32 before it, which is counted to read what it picks alone;
    whole numbers are gathered by GatherElements without the cast. Where shapes differ along other dimensions, and the
    dimension is not the last, tensor and places are transposed before it, and the result behind."""
    tensor, index, result = call.tensor("self"), call.tensor("index"), call.result
    dim = call.given["dim"] % max(1, tensor.dim())
    is_same = all(tensor.shape[n] == index.shape[n] for n in range(tensor.dim()) if n != dim)
    is_transposed = dim != tensor.dim() - 1 and not is_same
    if is_transposed:
        yield Kernel("Transpose", 2 * nbytes(tensor), workspace=nbytes(tensor))
        yield Kernel("Transpose", 2 * nbytes(index), workspace=nbytes(index))
    is_fast = is_same and tensor.dtype in (torch.float32, *HALF)
    if is_fast:
        yield from cast(index, torch.int32)
    places = nbytes(index, torch.int32) if is_fast else nbytes(index)
    name = "GatherElementsV2" if is_fast else "GatherElements"
    yield call.main(name, 2 * nbytes(result) + places, workspace=nbytes(result) * is_transposed)
    if is_transposed:
        yield Kernel("Transpose", 2 * nbytes(result))


@row(
    "scatter",
    "scatter_add",
    source="ops-nn index/scatter_elements_v2/op_api/aclnn_scatter.cpp 8.5.0:460-683 9.0.0:534-820 9.1.0:469-872, "
    "scatter_elements.cpp, op_kernel/scatter_elements_v2.h; op-plugin Scatter, ScatterAdd",
)
def _scatter(call: Call) -> Iterable[Kernel]:
    """ScatterElementsV2, which reads and writes whole rows along the dimension for the elements that it puts there;
    LinearIndex of the places before it, BroadcastTo of a number, and out of place a copy of the tensor. Along another
    dimension than the last one all of these are transposed before, and the result behind. On the AI CPU for booleans
    and int64, and for rows of more than 50 loops."""
    tensor, index, result = call.tensor("self"), call.tensor("index"), call.result
    whole, put, size = nbytes(tensor), index.numel() * tensor.element_size(), tensor.element_size()
    dim, is_cast = call.given["dim"] % max(1, tensor.dim()), index.dtype is not torch.int32
    is_known = tensor.dtype in _ADDED_IN_WORDS
    if not isinstance(call.given.get("src"), Tensor):
        yield Kernel("BroadcastTo", put, workspace=put)
    is_transposed = dim != tensor.dim() - 1 and is_known
    if is_transposed:
        yield Kernel("Transpose", 2 * whole, workspace=whole)
        yield Kernel("Transpose", 2 * nbytes(index), workspace=nbytes(index))
        yield Kernel("Transpose", 2 * put, workspace=put)
    if is_known:
        yield Kernel("LinearIndex", nbytes(index) + 4 * index.numel(), workspace=4 * index.numel())
    if not call.name.endswith("_"):
        yield Kernel("TensorMove", 2 * whole)
    length = tensor.shape[dim] if tensor.dim() else 1
    touched = min(whole, prod(index.shape[n] for n in range(index.dim()) if n != dim) * length * size)
    in_core = 98304 // (size + 4 * (tensor.dtype in HALF))  # elements that a loop takes
    on_ai_cpu = not is_known or length > 50 * in_core
    moved = (2 * put if on_ai_cpu else 2 * touched + put) + index.numel() * (4 if is_known and is_cast else 8)
    yield call.main("ScatterElements" if on_ai_cpu else "ScatterElementsV2", moved, on_ai_cpu=on_ai_cpu)
    if is_transposed:
        yield Kernel("Transpose", 2 * nbytes(result))


def _unmasked(index: Tensor | None) -> list[Tensor | None]:
    """Return what an index is to a kernel: of a mask, the numbers of its elements along each dimension."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long, device="meta") for _ in index.shape]


def _laid_out(call: Call) -> Iterable[Kernel]:
    """Give the kernels that run for tensors of indices: each as large as all together, and a look at each from 9.1 on.

    op-plugin expands them, so that ``aclnnIndex`` lays them out; IndexCheck says what is out of range.
    """
    indices = [index for index in call.given["indices"] if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    for index in indices:
        if index.shape != shape:
            laid_out = prod(shape) * index.element_size()
            yield Kernel("BroadcastTo", nbytes(index) + laid_out, workspace=laid_out)
    if call.cann >= (9, 1):
        yield Kernel("IndexCheck", sum(prod(shape) * index.element_size() for index in indices))


@row(
    "index",
    source="ops-nn index/index/op_api/aclnn_index.cpp 8.5.0:277-418 9.0.0:461-514 9.1.0:344-558; op-plugin Index",
)
def _index(call: Call) -> Iterable[Kernel]:
    """One Index, and from CANN 9.1 on an IndexCheck before it; tensors of indices of different shapes are broadcast
    first. On the AI CPU where a dimension lies between those that are indexed."""
    yield from _laid_out(call)
    given = [index is not None for index in call.given["indices"]]
    is_apart = "101" in "".join(map(str, map(int, given))).replace("00", "0")
    yield call.main("Index", on_ai_cpu=is_apart)


@row(
    "index_put",
    "_index_put_impl",
    source="ops-nn index/index_put_v2/op_api/aclnn_index_put_impl.cpp 8.5.0:1036-1273 9.0.0:1087-1331 9.1.0:1287-1569, "
    "index_put_with_sort.cpp; op-plugin IndexPut",
)
def _index_put(call: Call) -> Iterable[Kernel]:
    """One IndexPutV2 in place, and from CANN 9.1 on an IndexCheck before it; out of place a copy of the tensor. What is
    added up in 16 bits is cast to float32, the whole tensor too, and back; many or long rows are sorted instead:
    LinearIndexV2, Sort and IndexPutWithSort."""
    tensor, values, result = call.tensor("self"), call.tensor("values"), call.result
    if not call.name.endswith("_"):
        yield Kernel("TensorMove", nbytes(tensor) + nbytes(result))
    yield from _laid_out(call)
    # a mask stands for as many tensors of indices as it has dimensions, which are as long as it is large at most
    indices = [one for index in call.given["indices"] for one in _unmasked(index)]
    given = [index for index in indices if index is not None]
    count = prod(torch.broadcast_shapes(*(index.shape for index in given)))
    length = prod(tensor.shape[len(indices) :])
    put = length * count * prod(size for size, index in zip(tensor.shape, indices) if index is None)
    is_half = tensor.dtype in HALF
    places = count * sum(index.element_size() for index in given)
    if not call.given["accumulate"]:
        yield call.main("IndexPutV2", nbytes(values) + put * tensor.element_size() + places)
        return
    if _is_sorted(call, count, length):
        yield Kernel("LinearIndexV2", places + 4 * count, workspace=4 * count)
        yield Kernel("Sort", 12 * count, workspace=8 * count)
        yield call.main("IndexPutWithSort", nbytes(values) + 2 * put * tensor.element_size() + 8 * count)
        return
    if is_half:
        yield from cast(tensor, torch.float32)
        yield from cast(values, torch.float32)
    dtype = torch.float32 if is_half else tensor.dtype
    yield call.main("IndexPutV2", nbytes(values, dtype) + 2 * put * dtype.itemsize + places)
    if is_half:
        yield Kernel("Cast", nbytes(tensor, torch.float32) + nbytes(tensor))


def _is_sorted(call: Call, count: int, length: int) -> bool:
    """Tell whether rows that are added up are sorted first, which is for first dimensions that are indexed all.

    ``IsIndexPutWithSortSupport`` and ``IndexPutWithSortBetter`` of CANN's ops-nn, index_put_with_sort.cpp.
    """
    tensor, values = call.tensor("self"), call.tensor("values")
    if None in call.given["indices"] or tensor.dtype is not values.dtype:
        return False
    if tensor.dtype not in (torch.float32, *HALF):
        return False
    if count >= 20_000 and length <= 128:
        return True
    if tensor.dtype is torch.float32:
        return count >= 100_000 and length <= 1024
    return (
        count >= 100_000
        or length >= 100_000
        or (count >= 100 and length >= 30_000)
        or 6 * (tensor.numel() + values.numel()) > 250 * 2**20
    )


@row(
    "index_add",
    source="ops-nn index/inplace_scatter_add/op_host/op_api/aclnn_index_add.cpp 8.5.0:199-305 9.x:220-380",
)
def _index_add(call: Call) -> Iterable[Kernel]:
    """One InplaceIndexAdd, or InplaceScatterAdd from CANN 9.0 on for float32 along the first dimension; 16 bits along
    it are a cast of the numbers of rows to int32, a Sort of these and InplaceIndexAddWithSorted. bfloat16 along another
    dimension is cast to float32, the whole tensor too, and back; out of place the tensor is copied first."""
    tensor, index, source = call.tensor("self"), call.tensor("index"), call.tensor("source")
    if not call.name.endswith("_"):
        yield Kernel("TensorMove", 2 * nbytes(tensor))
    is_first = call.given["dim"] % max(1, tensor.dim()) == 0
    if is_first and tensor.dtype in HALF:
        yield from cast(index, torch.int32)
        yield Kernel("Sort", 12 * index.numel(), workspace=8 * index.numel())
        yield call.main("InplaceIndexAddWithSorted", 3 * nbytes(source) + 8 * index.numel())
        return
    is_cast = tensor.dtype is torch.bfloat16
    dtype = torch.float32 if is_cast else tensor.dtype
    yield from cast(tensor, dtype)
    yield from cast(source, dtype)
    is_new = call.cann >= (9, 0) and is_first and dtype in (torch.float32, torch.int32) and call.given["alpha"] == 1
    name = "InplaceScatterAdd" if is_new else "InplaceIndexAdd"
    yield call.main(name, 3 * nbytes(source, dtype) + nbytes(index))
    if is_cast:
        yield Kernel("Cast", nbytes(tensor, dtype) + nbytes(tensor))
