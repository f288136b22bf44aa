"""What runs on the device behind a call: kernels and their bytes, worked out by hand from CANN's sources.

Shapes are small, so that each number below can be followed: a tensor of 8 x 16 has 128 elements, which are 512 bytes
in float32, 256 in 16 bits and 1,024 in int64.
"""

from __future__ import annotations

import pytest
import torch

from tests.integration.measuring.inside.recorder import recorded, runs

HALF = torch.bfloat16


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="npu")


def test_products_of_mixed_dtypes_are_one_kernel_and_a_cast_of_what_is_narrower() -> None:
    """aclnnMul reads bfloat16 and float32 at once and gives float32; in place it casts first."""
    half, full = ones(8, 16, dtype=HALF), ones(8, 16)
    assert runs(lambda: half * full) == [("Mul", 256 + 512 + 512)]
    assert runs(lambda: torch.mul(full, full, out=half)) == [("Mul", 3 * 512), ("Cast", 512 + 256)]
    assert runs(lambda: full.mul_(half)) == [("Cast", 256 + 512), ("Mul", 3 * 512)]
    assert runs(lambda: half * 0.5) == [("Muls", 2 * 256)]
    assert runs(lambda: half * 2) == [("Cast", 256 + 512), ("Mul", 2 * 512), ("Cast", 512 + 256)]
    assert runs(lambda: full * 2) == [("Mul", 2 * 512)]


def test_a_difference_casts_what_a_sum_reads_as_it_is() -> None:
    half, full = ones(8, 16, dtype=HALF), ones(8, 16)
    assert runs(lambda: half + full) == [("Add", 256 + 512 + 512)]
    assert runs(lambda: half - full) == [("Cast", 256 + 512), ("Sub", 3 * 512)]
    assert runs(lambda: torch.add(full, full, alpha=2)) == [("Axpy", 3 * 512)]
    # no Axpy of bfloat16
    assert runs(lambda: torch.add(half, half, alpha=2)) == [("Mul", 2 * 256), ("Add", 3 * 256)]
    assert runs(lambda: half + 1) == [("Add", 2 * 256)]


def test_strided_operands_are_copied_first_and_strided_results_back() -> None:
    """A slice of 8 x 8 has 64 elements; a transposed slice with short rows is a slice and a transpose."""
    full, part = ones(8, 16), ones(8, 8)
    assert runs(lambda: full[:, :8] * part) == [("Slice", 2 * 256), ("Mul", 3 * 256)]
    assert runs(lambda: part.t() * part) == [("Transpose", 2 * 256), ("Mul", 3 * 256)]
    assert runs(lambda: full[:, :8].t().exp()) == [("Slice", 512), ("Transpose", 512), ("Exp", 512)]
    assert runs(lambda: full[:, :8].mul_(part)) == [("Slice", 512), ("Mul", 3 * 256), ("ViewCopy", 2 * 256)]
    assert runs(lambda: ones(8, 1).expand(8, 16).exp())[1:] == [("BroadcastTo", 32 + 512), ("Exp", 2 * 512)]
    mask = ones(8, 1, dtype=torch.bool)
    assert runs(lambda: mask.expand(8, 16).logical_not()) == [
        ("Cast", 8 + 32), ("BroadcastTo", 32 + 512), ("Cast", 512 + 128), ("LogicalNot", 2 * 128)
    ]  # fmt: skip


def test_divisions_of_mixed_dtypes_are_cast_before_cann_9() -> None:
    half, full = ones(8, 16, dtype=HALF), ones(8, 16)
    assert runs(lambda: half / full) == [("RealDiv", 256 + 512 + 512)]
    assert runs(lambda: half / full, (8, 5)) == [("Cast", 256 + 512), ("RealDiv", 3 * 512)]
    assert runs(lambda: half / 3) == [("RealDiv", 2 * 256)]


@pytest.mark.parametrize(("exponent", "kernel"), [(2, "Pows"), (0.5, "Pows"), (-0.5, "Pows"), (2.5, "Pow")])
def test_powers_that_have_a_kernel_of_their_own(exponent: float, kernel: str) -> None:
    full = ones(8, 16)
    assert runs(lambda: full.pow(exponent)) == [(kernel, 2 * 512)]


def test_comparisons_write_booleans() -> None:
    half, full = ones(8, 16, dtype=HALF), ones(8, 16)
    assert runs(lambda: half > full) == [("Cast", 256 + 512), ("Greater", 2 * 512 + 128)]
    assert runs(lambda: half.eq(0)) == [("Equal", 256 + 128)]
    assert runs(lambda: torch.where(half > half, half, half))[1:] == [("SelectV2", 128 + 3 * 256)]
    mask = ones(8, 16, dtype=torch.bool)
    assert runs(lambda: full.masked_fill_(mask, 0.0)) == [("MaskedFill", 2 * 512 + 128)]
    assert runs(lambda: full.masked_fill(mask, 0.0)) == [("TensorMove", 2 * 512), ("MaskedFill", 2 * 512 + 128)]


def test_copies_keep_the_strides_of_a_clone_and_transpose_twice() -> None:
    full, half = ones(8, 16), ones(8, 16, dtype=HALF)
    assert runs(lambda: full.clone()) == [("TensorMove", 2 * 512)]
    assert runs(lambda: full.t().contiguous()) == [("Transpose", 2 * 512)]
    assert runs(lambda: full.t().clone()) == [("Transpose", 2 * 512), ("Transpose", 2 * 512)]
    assert runs(lambda: half.float()) == [("Cast", 256 + 512)]
    assert runs(lambda: half.t().float()) == [("Transpose", 2 * 256), ("Cast", 256 + 512), ("Transpose", 2 * 512)]
    assert runs(lambda: full.copy_(half)) == [("Cast", 256 + 512)]
    assert runs(lambda: full[:, :8].copy_(half[:, :8])) == [
        ("Slice", 2 * 128), ("Cast", 128 + 256), ("ViewCopy", 2 * 256)
    ]  # fmt: skip


def test_some_strides_are_written_on_the_ai_cpu() -> None:
    """ViewCopy of CANN's ops-math takes gaps behind one dimension, and no rows that lie in another order."""
    whole = ones(4, 8, 16)
    assert recorded(lambda: whole[:, :, :8].fill_(1.0)).on_ai_cpu == []
    assert recorded(lambda: whole[:, :4, :8].transpose(0, 1).fill_(1.0)).on_ai_cpu == ["ViewCopy"]


def test_tensors_are_put_together_32_at_once() -> None:
    """40 tensors of 16 floats: 32 and 8 of them, and what these made; all along the first dimension from 9.0 on."""
    rows = [ones(1, 16) for _ in range(40)]
    columns = [ones(16, 1) for _ in range(40)]
    parts = [("ConcatD", 2 * 32 * 64), ("ConcatD", 2 * 8 * 64), ("ConcatD", 2 * 40 * 64)]
    assert runs(lambda: torch.cat(rows)) == [("ConcatD", 2 * 40 * 64)]
    assert runs(lambda: torch.cat(rows), (8, 5)) == parts
    assert runs(lambda: torch.cat(columns, 1)) == parts
    half = ones(8, 16, dtype=HALF)
    assert runs(lambda: torch.cat((half, ones(8, 16))))[1:] == [("Cast", 256 + 512), ("ConcatD", 4 * 512)]


def test_a_gradient_of_a_slice_is_zeros_and_a_copy() -> None:
    """Zeros of 8 x 16 floats, and 64 of them that are written with a stride."""
    backward = torch.ops.aten.slice_backward.default
    grad = ones(8, 8)
    assert runs(lambda: backward(grad, [8, 16], 1, 0, 8, 1)) == [("ZerosLike", 512), ("ViewCopy", 2 * 256)]
    assert runs(lambda: torch.ops.aten.select_backward.default(ones(16), [8, 16], 0, 3))[1:] == [
        ("ZerosLike", 512), ("TensorMove", 2 * 64)
    ]  # fmt: skip


def test_products_read_what_is_transposed_as_it_lies() -> None:
    """4 x 8 times 8 x 16 in bfloat16: 64, 256 and 128 bytes."""
    left, right = ones(4, 8, dtype=HALF), ones(16, 8, dtype=HALF)
    assert runs(lambda: left @ right.t()) == [("MatMulV3", 64 + 256 + 128)]
    assert runs(lambda: left @ ones(8, 32, dtype=HALF)[:, :16])[1:] == [
        ("Slice", 2 * 256),
        ("MatMulV3", 64 + 256 + 128),
    ]
    batch, expanded = ones(2, 4, 8, dtype=HALF), right.t().expand(2, 8, 16)
    assert runs(lambda: torch.bmm(batch, expanded)) == [
        ("Transpose", 2 * 256), ("BroadcastTo", 256 + 512), ("BatchMatMulV3", 128 + 512 + 256)
    ]  # fmt: skip


def test_gradients_of_a_product_are_two_products() -> None:
    """Of 2 x 4 x 8 times 8 x 16 in float32: 256 and 512 bytes, with 512 bytes of gradient that both of them read."""
    left, right, grad = ones(2, 4, 8), ones(8, 16), ones(2, 4, 16)
    backward = torch.ops.aten.matmul_backward.default
    both = [("MatMulV3", 256 + 512 + 512), ("MatMulV3", 512 + 512 + 256)]
    assert runs(lambda: backward(grad, left, right, [True, True])) == both
    assert runs(lambda: backward(grad, left, right, [False, True])) == both[:1]


def test_adding_to_a_product_of_16_bits_goes_through_float32() -> None:
    """Of 4 x 8 times 8 x 16: 28 bytes for each element of the result, beyond what the product reads."""
    added, left, right = (ones(*shape, dtype=HALF) for shape in ((4, 16), (4, 8), (8, 16)))
    four = [("Cast", 128 + 256), ("MatMulV3", 64 + 256 + 256), ("Add", 3 * 256), ("Cast", 256 + 128)]
    assert runs(lambda: torch.addmm(added, left, right)) == four
    assert runs(lambda: added.addmm_(left, right)) == four
    assert runs(lambda: torch.addmm(added, left, right, alpha=2))[2] == ("Axpy", 3 * 256)
    bias = ones(16, dtype=HALF)
    assert runs(lambda: torch.addmm(bias, left, right)) == [("Cast", 32 + 64), ("MatMulV3", 64 + 256 + 128 + 32)]
    full, one, other = ones(2, 4, 16), ones(2, 4, 8), ones(2, 8, 16)
    # a Muls by 1 runs as well
    assert runs(lambda: torch.baddbmm(full, one, other)) == [
        ("Muls", 2 * 512), ("BatchMatMulV3", 256 + 1024 + 512), ("Add", 3 * 512)
    ]  # fmt: skip
    assert runs(lambda: torch.baddbmm(full, one, other, beta=0)) == [
        ("BatchMatMulV3", 256 + 1024 + 512), ("Muls", 2 * 512)
    ]  # fmt: skip


def test_a_logsumexp_writes_a_float32_copy_of_its_tensor() -> None:
    """Of 8 x 16 in bfloat16, with 8 maxima of 32 bytes."""
    recorder = recorded(lambda: ones(8, 16, dtype=HALF).logsumexp(-1))
    assert recorder.ran[1:] == [
        ("Cast", 256 + 512), ("ReduceMax", 512 + 32), ("Abs", 64), ("Equal", 32 + 8), ("MaskedFill", 64 + 8),
        ("Sub", 512 + 32 + 512), ("ReduceLogSumExp", 512 + 32), ("Add", 3 * 32), ("Cast", 32 + 16),
    ]  # fmt: skip
    assert sum(each.workspace for each in recorder.runs) >= 2 * 512


def test_sums_cast_what_has_another_dtype_as_a_whole() -> None:
    half = ones(8, 16, dtype=HALF)
    assert runs(lambda: half.sum(-1)) == [("ReduceSum", 256 + 16)]
    assert runs(lambda: half.sum(-1, dtype=torch.float32)) == [("Cast", 256 + 512), ("ReduceSum", 512 + 32)]
    assert runs(lambda: half.softmax(-1, dtype=torch.float32)) == [("Cast", 256 + 512), ("SoftmaxV2", 2 * 512)]
    assert runs(lambda: half.max(-1)) == [("ArgMaxWithValue", 256 + 16 + 32), ("Cast", 32 + 64)]
    assert runs(lambda: half.argmax(-1)) == [("ArgMaxV2", 256 + 32), ("Cast", 32 + 64)]


def test_a_cumsum_of_int64_runs_on_the_ai_cpu() -> None:
    numbers = ones(8, 16, dtype=torch.int64)
    assert recorded(lambda: numbers.cumsum(0)).on_ai_cpu == ["Cumsum"]
    assert runs(lambda: numbers.cumsum(0, dtype=torch.int32)) == [("Cast", 1024 + 512), ("Cumsum", 2 * 512)]
    assert recorded(lambda: numbers.cumsum(0, dtype=torch.int32)).on_ai_cpu == []


def test_few_of_the_largest_are_found_twice() -> None:
    """2 of 64: TopK of 32, TopK of these, and their places; 16 of 64 at once. 4 rows of 64 floats are 1,024 bytes."""
    rows = ones(4, 64)
    assert runs(lambda: rows.topk(2)) == [
        ("TopKV2", 1024 + 512 + 512), ("TopKV2", 512 + 32 + 32), ("GatherElements", 3 * 32), ("Cast", 32 + 64)
    ]  # fmt: skip
    assert runs(lambda: rows.topk(16)) == [("TopKV2", 1024 + 256 + 256), ("Cast", 256 + 512)]


def test_elements_are_put_into_a_cache_by_transposing_it() -> None:
    """A cache of 1 x 2 x 8 x 4 floats in 256 bytes, a token of 32; in place along the first dimension."""
    cache, token, place = ones(1, 2, 8, 4), ones(1, 2, 1, 4), torch.zeros(1, dtype=torch.int64, device="npu")
    assert runs(lambda: cache.index_copy_(2, place, token)) == [
        ("Transpose", 2 * 256), ("Transpose", 2 * 32), ("ScatterUpdate", 2 * 32), ("Transpose", 2 * 256)
    ]  # fmt: skip
    assert runs(lambda: cache[0].index_copy_(0, place, ones(1, 8, 4)))[1:] == [("ScatterUpdate", 2 * 128)]


def test_a_scatter_reads_and_writes_whole_rows() -> None:
    """8 rows of 64 bytes for 8 elements of 4."""
    table, places = ones(8, 16), torch.zeros(8, 1, dtype=torch.int64, device="npu")
    scatter = [("BroadcastTo", 32), ("LinearIndex", 64 + 32), ("ScatterElementsV2", 2 * 512 + 32 + 32)]
    assert runs(lambda: table.scatter_(1, places, 0.5)) == scatter
    assert runs(lambda: table.scatter(1, places, 0.5)) == [*scatter[:2], ("TensorMove", 2 * 512), scatter[2]]
    assert recorded(lambda: ones(1, 1_300_000).scatter_(1, places[:1], 0.5)).on_ai_cpu == ["ScatterElements"]
    assert recorded(lambda: table.long().scatter_(1, places, 1)).on_ai_cpu == ["ScatterElements"]


def test_indices_are_checked_from_cann_9_1_on() -> None:
    """4 rows of 64 bytes, by 4 numbers of 8."""
    table, rows = ones(8, 16), torch.arange(4, device="npu")
    assert runs(lambda: table[rows]) == [("IndexCheck", 32), ("Index", 2 * 256 + 32)]
    assert runs(lambda: table[rows], (9, 0)) == [("Index", 2 * 256 + 32)]


def test_a_mask_picks_no_more_than_it_is_large() -> None:
    """A mask of 8 x 16 over rows of 32 floats: 128 rows at most, each with two numbers of 8 bytes, and one value."""
    table, mask = ones(8, 16, 32), torch.zeros(8, 16, dtype=torch.bool, device="npu")
    put = ("IndexPutV2", 4 + 128 * 32 * 4 + 2 * 128 * 8)
    assert runs(lambda: table.index_put_((mask,), table.new_zeros(())))[-1] == put


def test_what_is_added_up_in_16_bits_casts_the_whole_tensor() -> None:
    """A table of 8 x 16 in bfloat16, and 4 of its rows: 256 and 128 bytes."""
    table, rows = ones(8, 16, dtype=HALF), torch.arange(4, device="npu")
    added = ones(4, 16, dtype=HALF)
    put = table.index_put_
    assert runs(lambda: put((rows,), added), (9, 0)) == [("IndexPutV2", 128 + 128 + 32)]
    assert runs(lambda: put((rows,), added, accumulate=True), (9, 0)) == [
        ("Cast", 256 + 512), ("Cast", 128 + 256), ("IndexPutV2", 256 + 2 * 256 + 32), ("Cast", 512 + 256)
    ]  # fmt: skip
    assert runs(lambda: table.index_add_(0, rows, added)) == [
        ("Cast", 32 + 16), ("Sort", 12 * 4), ("InplaceIndexAddWithSorted", 3 * 128 + 8 * 4)
    ]  # fmt: skip


def test_gradients_of_an_embedding_are_sorted_and_added_up_in_float32() -> None:
    """Of 4 rows of 1,024 elements in bfloat16 into a table of 16: 8 KiB in 16 bits, 16 and 64 KiB in float32."""
    grad, rows = ones(4, 1024, dtype=HALF), torch.arange(4, device="npu")
    kib = 1024
    backward = torch.ops.aten.embedding_dense_backward.default
    kernels = [
        ("Cast", 8 * kib + 16 * kib), ("Cast", 32 + 16), ("Sort", 12 * 4), ("ZerosLike", 64 * kib),
        ("EmbeddingDenseGradV2", 3 * 16 * kib + 8 * 4), ("Cast", 64 * kib + 32 * kib),
    ]  # fmt: skip
    assert runs(lambda: backward(grad, rows, 16, -1, False)) == kernels


def test_lists_are_taken_48_tensors_at_once() -> None:
    """50 tensors of 16 floats: 24 with their results, 48 in place; 12 of three lists in place are 36."""
    tensors = [ones(16) for _ in range(50)]
    assert [moved for _, moved in runs(lambda: torch._foreach_sqrt(tensors))] == [24 * 128, 24 * 128, 2 * 128]
    assert len(runs(lambda: torch._foreach_mul_(tensors, 0.5))) == 2
    assert len(runs(lambda: torch._foreach_add_(tensors, tensors))) == 3  # 24, 24 and 2
    few = tensors[:12]
    assert len(runs(lambda: torch._foreach_addcdiv_(few, few, few, 0.5))) == 1
    # op-plugin takes a list of numbers apart
    assert len(runs(lambda: torch._foreach_addcdiv_(few, few, few, [0.5] * 12))) == 12


def test_a_convolution_lays_its_tensors_out_anew() -> None:
    """Of 16 channels of 20 elements with 4 each, in bfloat16: 640 bytes in, 16 x 17 elements or 544 bytes out, and 128
    bytes of filters, which are 16 x 16 x 4 elements or 2,048 bytes in the layout of a convolution."""
    tensor, weight = ones(1, 16, 20, dtype=HALF), ones(16, 1, 4, dtype=HALF)
    assert runs(lambda: torch.nn.functional.conv1d(tensor, weight, groups=16)) == [
        ("TransData", 2 * 640), ("TransData", 128 + 2048), ("Conv2D", 640 + 2048 + 544), ("TransData", 2 * 544)
    ]  # fmt: skip


def test_the_gradient_of_a_convolution_does_so_too() -> None:
    """The sizes above: filters of 2,048 bytes are 4,096 in float32, in which their gradient is summed."""
    tensor, weight, grad = ones(1, 16, 20, dtype=HALF), ones(16, 1, 4, dtype=HALF), ones(1, 16, 17, dtype=HALF)
    options = [[16], [1], [0], [1], False, [0], 16]
    laid_out = [("TransData", 2 * 544), ("TransData", 2 * 640), ("TransData", 128 + 2048)]
    for_input = [("Conv2DBackpropInput", 544 + 2048 + 640), ("TransData", 2 * 640)]
    for_weight = [("Conv2DBackpropFilter", 544 + 640 + 4096), ("Cast", 4096 + 2048), ("TransData", 2048 + 128)]
    backward = torch.ops.aten.convolution_backward
    found = runs(lambda: backward(grad, tensor, weight, *options, [True, True, True]))
    assert found == [("ReduceSum", 544 + 32), *laid_out, *for_input, *for_weight]
    assert runs(lambda: backward(grad, tensor, weight, *options, [True, False, False])) == [*laid_out, *for_input]


def test_gradients_of_softplus_are_in_float32_where_dtypes_differ() -> None:
    backward = torch.ops.aten.softplus_backward
    half, full = ones(8, 16, dtype=HALF), ones(8, 16)
    assert runs(lambda: backward(half, half, 1, 20)) == [("SoftplusV2Grad", 3 * 256)]
    assert ("SoftplusV2Grad", 3 * 512) in runs(lambda: backward(full, half, 1, 20))


def test_lists_are_zeroed_and_copied_48_tensors_at_once() -> None:
    """50 tensors of 16 floats, or of 16 in 16 bits; casts go along from CANN 9.1 on."""
    tensors, others = [ones(16) for _ in range(50)], [ones(16) for _ in range(50)]
    halves = [ones(16, dtype=HALF) for _ in range(50)]
    assert runs(lambda: torch._foreach_zero_(tensors)) == [("ForeachZeroInplace", n * 64) for n in (48, 2)]
    assert runs(lambda: torch._foreach_copy_(tensors, others)) == [("ForeachCopy", n * 128) for n in (48, 2)]
    assert len(runs(lambda: torch._foreach_copy_(tensors, halves))) == 2
    assert len(runs(lambda: torch._foreach_copy_(tensors, halves), (9, 0))) == 50


def test_nothing_of_cann_runs_for_tensors_of_the_host() -> None:
    assert runs(lambda: torch.ones(8, 16).ne(-100))[-1] == ("ne", 512 + 128)
