"""What runs behind one call of torch_npu's fused operators, by the arithmetic of their sources."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.integration.measuring.inside.recorder import Recorder, bf16


def test_sums_of_layer_norms_are_written_where_they_are_asked_for() -> None:
    """8 rows of 32 bfloat16: two read, one written or two, with two numbers of 4 bytes a row, and two weights."""
    x, weight = bf16(8, 32), bf16(32)
    for is_asked, tensors in ((False, 3), (True, 4)):
        with Recorder() as seen:
            torch.ops.npu.npu_add_layer_norm(x, x, weight, weight, 1e-5, is_asked)
        assert seen.ran == [("AddLayerNorm", tensors * 8 * 32 * 2 + 2 * 8 * 4 + 2 * 32 * 2)]


def test_tables_of_another_dtype_are_cast_before_a_rotation() -> None:
    """Of 16 positions and 128 numbers, from float32 to bfloat16; two heads are rotated."""
    x, table = bf16(1, 2, 16, 128), torch.ones(1, 1, 16, 128, device="npu")
    with Recorder() as seen:
        torch.ops.npu.npu_rotary_mul(x, table, table)
    cast, main = ("Cast", 2048 * (4 + 2)), ("RotaryPositionEmbedding", 2 * 4096 * 2 + 2 * 2048 * 2)
    assert seen.ran == [cast, cast, main]
    with Recorder() as seen:
        torch.ops.npu.npu_rotary_mul_backward(x, x, table, table)
    assert seen.ran == [cast, cast, ("RotaryPositionEmbeddingGrad", 2 * 4096 * 2 + 2 * 2048 * 2)]


def test_a_token_is_rotated_where_it_lies_by_the_rows_of_the_table_that_it_needs() -> None:
    """2 tokens with 2 heads of 128 as part of wider rows, and positions of 8 bytes in a table of 512 rows."""
    wide, table = bf16(2, 1024), bf16(512, 128)
    q, k = wide[:, :256], wide[:, 256:512]
    positions = torch.tensor([3, 5], device="npu")
    with Recorder() as seen:
        torch.ops.npu.npu_mrope(positions, q, k, table, 128)
    assert seen.ran == [("RopeWithSinCosCache", 4 * 512 * 2 + 2 * 128 * 2 + 2 * 8)]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_weights_of_experts_are_multiplied_as_they_lie(is_transposed: bool) -> None:
    """16 rows of 32 numbers through 4 matrices of 32 x 64, which no kernel copies, with 4 counts of 8 bytes."""
    x = bf16(16, 32)
    weight = bf16(4, 64, 32).mT if is_transposed else bf16(4, 32, 64)
    counts = torch.full((4,), 4, dtype=torch.int64, device="npu")
    with Recorder() as seen:
        torch.ops.npu.npu_grouped_matmul(
            [x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
        )
    assert seen.ran == [("GroupedMatmul", (16 * 32 + 4 * 32 * 64 + 16 * 64) * 2 + 4 * 8)]


def test_rows_of_groups_are_summed_over_as_they_lie() -> None:
    x, grad = bf16(16, 32), bf16(16, 64)
    counts = torch.full((4,), 4, dtype=torch.int64, device="npu")
    with Recorder() as seen:
        torch.ops.npu.npu_grouped_matmul(
            [x.t()], [grad], group_list=counts, split_item=3, group_type=2, group_list_type=1
        )
    assert seen.ran == [("GroupedMatmul", (16 * 32 + 16 * 64 + 4 * 32 * 64) * 2 + 4 * 8)]


def test_permuting_tokens_sorts_in_the_workspace() -> None:
    """8 tokens of 32 numbers to 2 experts each: 16 indices take 24 bytes, written and read."""
    tokens, indices = bf16(8, 32), torch.zeros(8, 2, dtype=torch.int32, device="npu")
    with Recorder() as seen:
        torch.ops.npu.npu_moe_token_permute(tokens, indices)
    assert seen.ran == [("MoeTokenPermute", (8 + 16) * 32 * 2 + 2 * 16 * 4 + 2 * 16 * 24)]
    assert seen.runs[0].workspace == 16 * 24


def test_gradients_of_permutations_read_what_they_need() -> None:
    """16 rows of 32 numbers, of 8 tokens, with where they came from."""
    tokens, rows, weights = bf16(8, 32), bf16(16, 32), bf16(8, 2)
    indices, order = torch.zeros(8, 2, dtype=torch.int32, device="npu"), torch.arange(16, device="npu").int()
    with Recorder() as seen:
        torch.ops.npu.npu_moe_token_permute_grad(tokens, rows, indices, order)
        torch.ops.npu.npu_moe_token_unpermute_grad(rows, rows, order)
        torch.ops.npu.npu_moe_token_unpermute_grad(rows, tokens, order, weights)
    assert seen.ran == [
        ("MoeTokenPermuteGrad", (16 + 8) * 32 * 2 + 16 * 4),
        ("MoeTokenUnpermuteGrad", (16 + 16) * 32 * 2 + 16 * 4),
        ("MoeTokenUnpermuteGrad", (16 + 8 + 16) * 32 * 2 + 16 * 4 + 2 * 16 * 2),
    ]


def test_rows_that_are_handed_out_for_a_gradient_do_not_move() -> None:
    """16 rows of 32 numbers become 8 tokens, by indices of 4 bytes and weights of 2, whichever operator that calls."""
    rows, weights, order = bf16(16, 32).requires_grad_(), bf16(8, 2), torch.arange(16, device="npu").int()
    with Recorder() as seen:
        torch.ops.npu.npu_moe_token_unpermute(rows, order, weights)
    assert seen.ran == [("MoeTokenUnpermute", (16 + 8) * 32 * 2 + 16 * 4 + 16 * 2)]


def test_scores_of_all_experts_are_written_where_they_are_asked_for() -> None:
    """4 rows of 256 scores of 4 bytes: 8 weights and 8 indices each, and all scores, or not."""
    x = torch.ones(4, 256, device="npu")
    for is_asked in (False, True):
        with Recorder() as seen:
            torch.ops.npu.npu_moe_gating_top_k(x, 8, norm_type=1, out_flag=is_asked)
        assert seen.ran == [("MoeGatingTopK", (2 if is_asked else 1) * 4096 + 4 * 8 * 8)]


def test_what_is_put_into_a_cache_is_all_that_moves() -> None:
    """A token of 2 sequences, 2 heads and 64 numbers, and 3 elements of a vector, with indices of 4 and 8 bytes."""
    with FakeTensorMode():
        cache, token, values = bf16(2, 2, 1024, 64), bf16(2, 2, 1, 64), bf16(3)
        ends = torch.ones(2, dtype=torch.int32, device="npu")
        places = torch.ones(3, 1, dtype=torch.int64, device="npu")
        with Recorder() as seen:
            torch.ops.npu.scatter_update_(cache, ends, token, -2)
            torch.ops.npu.npu_scatter_nd_update_(cache.view(-1), places, values)
    assert seen.ran == [("Scatter", 2 * 256 * 2 + 2 * 4), ("ScatterNdUpdate", 2 * 3 * 2 + 3 * 8)]


def test_dropout_writes_a_mask_of_bits_and_reads_it() -> None:
    """Of 1,024 elements of 2 bytes 128 bytes."""
    x = bf16(1024)
    with Recorder() as seen:
        torch.ops.npu._npu_dropout(x, 0.5)
    drawn = [("DSAGenBitMask", 128), ("DropOutDoMask", 2 * 2048 + 128)]
    assert seen.ran == drawn
    with Recorder() as seen:
        torch.ops.aten.native_dropout(x, 0.5, True)
        torch.ops.aten.native_dropout(x, 0.5, False)
    assert seen.ran == [*drawn, ("TensorMove", 2 * 2048), ("Fill", 1024)]


def test_gradients_of_a_linear_layer_are_two_products() -> None:
    """8 rows of 32 numbers through 64 x 32: both read the gradient of 8 x 64."""
    x, weight, grad = bf16(8, 32), bf16(64, 32), bf16(8, 64)
    with Recorder() as seen:
        torch.ops.npu.npu_linear_backward(grad, x, weight)
    assert seen.ran == [("MatMulV3", (512 + 2048 + 256) * 2), ("MatMulV3", (512 + 256 + 2048) * 2)]


def test_an_adam_step_reads_and_writes_three_tensors() -> None:
    """Of 256 numbers of 4 bytes, and reads a fourth."""
    parameter, first, second, grad = (torch.ones(256, device="npu") for _ in range(4))
    with Recorder() as seen:
        torch.ops.npu.npu_apply_adam_w.out(
            0.9, 0.99, 1e-3, 0.0, 0.9, 0.99, 1e-8, grad, None, False, False, out=[parameter, first, second]
        )
    assert seen.ran == [("ApplyAdamW", (2 * 3 + 1) * 1024)]


def test_a_cast_reads_one_dtype_and_writes_another() -> None:
    x = bf16(256)
    with Recorder() as seen:
        torch.ops.npu.npu_dtype_cast(x, torch.float32)
    assert seen.ran == [("Cast", 256 * (2 + 4))]
