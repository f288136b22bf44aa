"""What runs for products of matrices, and for systems of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.strided import contiguous, view_copy
from kernels_ext_npu.measuring.inside.table import HALF, Call, Kernel, always, cast, if_transposed, nbytes, row


@row(
    "linalg_solve_triangular",
    "triangular_solve",
    source="op-plugin LinalgSolveTriangularKernelNpuOpApi.cpp; ops-math math/triangular_solve, triangular_solve.cpp",
)
def _triangular_solve(call: Call) -> Iterable[Kernel]:
    """TriangularSolve on the AI CPU, the only one there is."""
    yield call.main("TriangularSolve", on_ai_cpu=True)


def _product(call: Call, left: Tensor, right: Tensor, written: int, workspace: int = 0) -> Iterable[Kernel]:
    """Give the kernels of a product of two tensors, which writes so many bytes.

    Where both are of 16 bits or both of float32, nothing is cast: ``Dav2201MatMulRule`` of ops-nn,
    matmul/common/op_host/op_api/matmul_util.cpp 9.1.0:2414-2526. A batch on the left alone is folded into its rows.
    """
    dtype = torch.promote_types(left.dtype, right.dtype)
    is_folded = left.dim() > 2 and right.dim() <= 2
    for operand, may_be_transposed in ((left, not is_folded), (right, True)):
        if not operand.is_contiguous() and not (may_be_transposed and if_transposed(operand)):
            yield from contiguous(operand)
        yield from cast(operand, dtype)
    is_batched = max(left.dim(), right.dim()) > 2 and not is_folded
    name = "BatchMatMulV3" if is_batched else "MatMulV3"
    yield call.main(name, nbytes(left, dtype) + nbytes(right, dtype) + written, workspace)


@row(
    "matmul",
    "mm",
    "bmm",
    source="ops-nn matmul/mat_mul_v3/op_host/op_api/aclnn_matmul.cpp 8.5.0:824-860 9.0.0:847-883 9.1.0:521-794, "
    "aclnn_mm.cpp, batch_mat_mul_v3/op_host/op_api/aclnn_batch_matmul.cpp; op-plugin Matmul, Mm, Bmm",
    reads_in_place=always,
)
def _matmul(call: Call) -> Iterable[Kernel]:
    """One product, which reads operands whose last two dimensions are swapped as they lie, and copies other strided
    ones: expanded batches, slices, and a transposed tensor with a batch that meets a matrix without one."""
    left, right, result = call.tensor("self"), call.tensor("mat2", "other"), call.result
    yield from _product(call, left, right, nbytes(result))
    if not result.is_contiguous():
        yield view_copy(result)


@row(
    "matmul_backward",
    source="op-plugin MatmulBackwardKernelNpuOpApi.cpp, the same in 7.1.0 to 26.1.0",
    reads_in_place=always,
)
def _matmul_backward(call: Call) -> Iterable[Kernel]:
    """A product for each gradient that is wanted. A strided gradient of the result is copied for each of them; a matrix
    on the left of a batch has both that gradient and the batch copied into one matrix."""
    grad, left, right = (call.tensor(name) for name in ("grad", "self", "other"))
    for_left, for_right = call.given["mask"]
    if for_right:
        rows, grads = (_flat(tensor) if right.dim() == 2 else tensor for tensor in (left, grad))
        yield from _product(call, rows.transpose(-2, -1) if rows.dim() > 1 else rows, grads, nbytes(right))
    if for_left:
        if right.dim() > 2 and left.dim() > 1 and left.numel() == left.shape[-1] * left.shape[-2]:
            yield Kernel("Transpose", 2 * nbytes(right), workspace=nbytes(right))
            yield Kernel("Transpose", 2 * nbytes(grad), workspace=nbytes(grad))
            yield call.main("MatMulV3", nbytes(grad) + nbytes(right) + nbytes(left))
        else:
            yield from _product(call, grad, right.transpose(-2, -1) if right.dim() > 1 else right, nbytes(left))


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix, where it can be seen as one."""
    return tensor.flatten(0, -2) if tensor.dim() > 2 and tensor.is_contiguous() else tensor


def _is_one(number: float) -> bool:
    return float(number) == 1


@row(
    "addmm",
    source="ops-nn matmul/mat_mul_v3/op_host/op_api/aclnn_addmm.cpp 8.5.0:465-636 9.0.0:517-691 9.1.0:519-735; "
    "op-plugin Addmm",
    reads_in_place=always,
)
def _addmm(call: Call) -> Iterable[Kernel]:
    """One product where a vector is added. A matrix that is added is an Add behind the product, or an Axpy with an
    ``alpha``, and a Muls before it with a ``beta``; for 16 bits the product is written in float32, what is added is
    cast to that, and their sum back."""
    added, left, right, result = call.tensor("self"), call.tensor("mat1"), call.tensor("mat2"), call.result
    alpha, beta, whole = call.given["alpha"], call.given["beta"], nbytes(result)
    if beta == 0:
        is_scaled = not _is_one(alpha)
        yield from _product(call, left, right, whole, workspace=whole * is_scaled)
        if is_scaled:
            yield Kernel("Muls", 2 * whole)
        return
    if not added.is_contiguous():
        yield from contiguous(added)
    if added.numel() == result.shape[-1] and added.shape[-1] == result.shape[-1] and _is_one(alpha) and _is_one(beta):
        if left.dtype is torch.bfloat16:
            yield from cast(added, torch.float32)
        *laid_out, product = _product(call, left, right, whole)
        yield from laid_out
        yield call.main(product.name, product.moved + nbytes(added))
        return
    if not _is_one(beta):
        yield Kernel("Muls", 2 * nbytes(added), workspace=nbytes(added))
    yield from _product_and_sum(call, added, left, right)


def _product_and_sum(call: Call, added: Tensor, left: Tensor, right: Tensor) -> Iterable[Kernel]:
    """Give the kernels of a product into the workspace, and of the sum; both in float32 where all is of 16 bits."""
    result, is_half = call.result, left.dtype in HALF
    dtype = torch.float32 if is_half else left.dtype
    yield from cast(added, dtype)
    written = nbytes(result, dtype)
    yield from _product(call, left, right, written, workspace=written)
    name = "Add" if _is_one(call.given["alpha"]) else "Axpy"
    yield Kernel(name, nbytes(added, dtype) + 2 * written, workspace=written * is_half)
    if is_half:
        yield Kernel("Cast", written + nbytes(result))
    if not result.is_contiguous():
        yield view_copy(result)


@row(
    "baddbmm",
    source="ops-nn matmul/batch_mat_mul_v3/op_host/op_api/aclnn_baddbmm.cpp 8.5.0:265-370 9.0.0:281-391 9.1.0:264-426; "
    "op-plugin Baddbmm",
    reads_in_place=always,
)
def _baddbmm(call: Call) -> Iterable[Kernel]:
    """A Muls by ``beta``, which runs for 1 as well, a product into the workspace, and an Add, or an Axpy with an
    ``alpha``; for 16 bits in float32, with casts before and behind the Add. A ``beta`` of 0 leaves product and Muls."""
    added, left, right, whole = call.tensor("self"), call.tensor("batch1"), call.tensor("batch2"), nbytes(call.result)
    if call.given["beta"] == 0:
        yield from _product(call, left, right, whole, workspace=whole)
        yield Kernel("Muls", 2 * whole)
        return
    if not added.is_contiguous():
        yield from contiguous(added)
    yield Kernel("Muls", 2 * nbytes(added), workspace=nbytes(added))
    yield from _product_and_sum(call, added, left, right)


@row(
    "_grouped_mm",
    source="torch, ATen/native/GroupedMMUtils.h; ops-nn matmul/mat_mul_v3/op_host/op_api/aclnn_mm.cpp",
    reads_in_place=if_transposed,
)
def _grouped_mm(call: Call) -> Iterable[Kernel]:
    """A loop of one product for each group, with what it reads and writes of the whole in equal shares."""
    groups = call.tensor("offs").numel()
    for _ in range(groups):
        yield call.main("MatMulV3", call.moved // groups)
