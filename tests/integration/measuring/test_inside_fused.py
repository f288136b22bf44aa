"""What runs behind one call of torch_npu's fused operators, by the arithmetic of their sources."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.inside import Inside


class Seen(Cost):
    """Keeps what ran for each call, and is told the release."""

    def __init__(self, cann: tuple[int, int] = (9, 1)) -> None:
        super().__init__()
        self._cann = cann
        self.runs: list[Inside] = []

    def count(self, *call):
        runs = super().count(*call)
        if runs is not None:
            self.runs.append(runs)
        return runs

    @property
    def ran(self) -> list[tuple[str, int]]:
        return [(kernel.name, kernel.moved) for runs in self.runs for kernel in runs.kernels]


def bf16(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device="npu")


def attend(q: Tensor, k: Tensor, v: Tensor, layout: str = "BNSD", **given):
    heads = q.shape[layout.index("N")]
    return torch.ops.npu.npu_fusion_attention(q, k, v, heads, layout, None, None, None, 0.1, **given)


def test_attention_pads_heads_that_its_kernel_does_not_take() -> None:
    """Latents of 576 become 640 of 2 bytes, and values of 512 for up to 1,024 keys too, which is cut from the result.

    Queries are 4 x 16 rows, keys and values 64; statistics are two times eight numbers of 4 bytes a row.
    """
    q, k, v = bf16(1, 4, 16, 576), bf16(1, 1, 64, 576), bf16(1, 1, 64, 512)
    with Seen() as seen:
        attend(q, k, v)
    rows, keys, statistics = 64, 64, 64 * 2 * 8 * 4
    assert seen.ran == [
        ("PadV3", rows * (576 + 640) * 2),
        ("PadV3", keys * (576 + 640) * 2),
        ("PadV3", keys * (512 + 640) * 2),
        ("FlashAttentionScore", (rows + 2 * keys + rows) * 640 * 2 + statistics),
        ("Slice", rows * (640 + 512) * 2),
    ]
    assert seen.runs[0].workspace == (rows + 2 * keys + rows) * 640 * 2


@pytest.mark.parametrize(("width", "padded"), [(64, 64), (72, 80), (128, 128), (160, 160), (192, 192), (200, 256)])
def test_attention_pads_to_sixteen_and_from_196_on_to_128(width: int, padded: int) -> None:
    q, k = bf16(1, 2, 16, width), bf16(1, 2, 16, width)
    with Seen() as seen:
        attend(q, k, k)
    every = [] if width == padded else [("PadV3", 32 * (width + padded) * 2)] * 3
    cut = [] if width == padded else [("Slice", 32 * (width + padded) * 2)]
    main = ("FlashAttentionScore", 4 * 32 * padded * 2 + 32 * 2 * 8 * 4)
    assert seen.ran == [*every, main, *cut]


def test_attention_transposes_what_is_farther_than_65535_elements_apart() -> None:
    """128 heads of 512 are 65,536 elements of 2 bytes a token."""
    q = bf16(1, 2, 128, 512)
    with Seen() as seen:
        attend(q, q, q, "BSND")
    size = 2 * 65536 * 2
    statistics = 2 * 128 * 2 * 8 * 4
    transposes = [("Transpose", 2 * size)] * 3
    assert seen.ran == [*transposes, ("FlashAttentionScore", 4 * size + statistics), ("Transpose", 2 * size)]


def test_attention_with_dropout_writes_a_mask_of_bits() -> None:
    """2 x 64 queries and 64 keys make 8,192 bits, which are written and read."""
    q = bf16(1, 2, 64, 64)
    with Seen() as seen:
        attend(q, q, q, keep_prob=0.5)
    main = 4 * 2 * 64 * 64 * 2 + 2 * 64 * 2 * 8 * 4 + 1024
    assert seen.ran == [("DSAGenBitMask", 1024), ("FlashAttentionScore", main)]


def test_gradients_of_attention_are_summed_up_in_float32() -> None:
    """Of 2 heads of 64 rows and 64 numbers: 8,192 elements each of query, key, value, result and its gradient.

    Each of the three gradients is 4 bytes that are zeroed, read, written and read again; the result's gradient is read
    twice, and the sums of its rows, eight times 4 bytes, are written and read.
    """
    q = bf16(1, 2, 64, 64)
    out, maximum, total, *_ = attend(q, q, q)
    with Seen() as seen:
        torch.ops.npu.npu_fusion_attention_grad(
            q, q, q, out, 2, "BNSD", softmax_max=maximum, softmax_sum=total, attention_in=out, scale_value=0.1
        )
    tensor, rows = 8192 * 2, 128
    base = 5 * tensor + 3 * tensor + 2 * rows * 8 * 4
    expected = base + 3 * 8192 * 16 + tensor + 2 * rows * 8 * 4
    assert seen.ran == [("FlashAttentionScoreGrad", expected)]
    assert seen.runs[0].workspace == 3 * 8192 * 4 + rows * 8 * 4


@pytest.mark.parametrize(("width", "padded"), [(96, 96), (160, 256), (192, 192), (200, 256)])
def test_gradients_of_attention_pad_to_128_but_for_192(width: int, padded: int) -> None:
    q = bf16(1, 2, 16, width)
    out, maximum, total, *_ = attend(q, q, q)
    with Seen() as seen:
        torch.ops.npu.npu_fusion_attention_grad(
            q, q, q, out, 2, "BNSD", softmax_max=maximum, softmax_sum=total, attention_in=out, scale_value=0.1
        )
    copied = ("PadV3", 32 * (width + padded) * 2), ("Slice", 32 * (width + padded) * 2)
    main = 8 * 32 * padded * 2 + 3 * 32 * padded * 16 + 32 * padded * 2 + 4 * 32 * 8 * 4
    expected = [("FlashAttentionScoreGrad", main)]
    if width != padded:
        expected = [copied[0]] * 5 + expected + [copied[1]] * 3
    assert seen.ran == expected


@pytest.mark.parametrize("width", [64, 128])
def test_packed_attention_of_usual_heads_is_one_kernel(width: int) -> None:
    """Whatever the lengths; the statistics are two times eight numbers of 4 bytes for each of 2 x 40 rows."""
    q = bf16(40, 2, width)
    with Seen() as seen:
        attend(q, q, q, "TND", actual_seq_qlen=[8, 40], actual_seq_kvlen=[8, 40])
    assert seen.ran == [("FlashAttentionScore", 4 * 80 * width * 2 + 80 * 2 * 8 * 4)]


def test_short_packed_attention_of_narrow_heads_is_not_padded() -> None:
    """Heads of 72 in sequences of up to 1,024 keys; in longer ones they become 80."""
    q = bf16(1100, 1, 72)
    for ends, padded in (([600, 1100], 72), ([1100], 80)):
        with Seen() as seen:
            attend(q, q, q, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)
        main = ("FlashAttentionScore", 4 * 1100 * padded * 2 + 1100 * 2 * 8 * 4)
        assert [kernel for kernel in seen.ran if kernel[0] != "PadV3" and kernel[0] != "Slice"] == [main], ends
        assert len(seen.ran) == (1 if padded == 72 else 5)


def test_gradients_of_latents_pad_values_where_the_order_of_sums_is_fixed() -> None:
    """Heads of 192 and 128: free sums take them as they are, fixed ones pad value, result and gradient to 192."""
    q, v = bf16(1, 2, 16, 192), bf16(1, 2, 16, 128)
    out = bf16(1, 2, 16, 128)
    maximum = total = torch.ones(1, 2, 16, 8, device="npu")
    ran = []
    for is_fixed in (False, True):
        torch.use_deterministic_algorithms(is_fixed)
        try:
            with Seen() as seen:
                torch.ops.npu.npu_fusion_attention_grad(
                    q, q, v, out, 2, "BNSD", softmax_max=maximum, softmax_sum=total, attention_in=out, scale_value=0.1
                )
        finally:
            torch.use_deterministic_algorithms(False)
        ran.append(seen.ran)
    rows = 32
    sums = 2 * rows * 8 * 4  # of rows of the result times its gradient, written and read
    statistics = 2 * rows * 8 * 4
    free = rows * (2 * 192 + 3 * 128) * 2 + rows * (2 * 192 + 128) * 2 + statistics
    free += rows * (2 * 192 + 128) * 16 + rows * 128 * 2 + sums
    assert ran[0] == [("FlashAttentionScoreGrad", free)]
    copied = rows * (128 + 192) * 2
    fixed = 8 * rows * 192 * 2 + statistics + 3 * rows * 192 * 16 + rows * 192 * 2 + sums
    assert ran[1] == [("PadV3", copied)] * 3 + [("FlashAttentionScoreGrad", fixed), ("Slice", copied)]


def test_strided_operands_of_attention_are_copied() -> None:
    """[B, S, N, D] as BNSD: each of three operands of 2 x 16 x 64 numbers of 2 bytes is transposed first."""
    q = bf16(1, 16, 2, 64).transpose(1, 2)
    with Seen() as seen:
        attend(q, q, q)
    assert seen.ran[:3] == [("Transpose", 2 * 2048 * 2)] * 3
    assert len(seen.ran) == 4


def test_sums_of_layer_norms_are_written_where_they_are_asked_for() -> None:
    """8 rows of 32 bfloat16: two read, one written or two, with two numbers of 4 bytes a row, and two weights."""
    x, weight = bf16(8, 32), bf16(32)
    for is_asked, tensors in ((False, 3), (True, 4)):
        with Seen() as seen:
            torch.ops.npu.npu_add_layer_norm(x, x, weight, weight, 1e-5, is_asked)
        assert seen.ran == [("AddLayerNorm", tensors * 8 * 32 * 2 + 2 * 8 * 4 + 2 * 32 * 2)]


def test_tables_of_another_dtype_are_cast_before_a_rotation() -> None:
    """Of 16 positions and 128 numbers, from float32 to bfloat16; two heads are rotated."""
    x, table = bf16(1, 2, 16, 128), torch.ones(1, 1, 16, 128, device="npu")
    with Seen() as seen:
        torch.ops.npu.npu_rotary_mul(x, table, table)
    cast, main = ("Cast", 2048 * (4 + 2)), ("RotaryPositionEmbedding", 2 * 4096 * 2 + 2 * 2048 * 2)
    assert seen.ran == [cast, cast, main]
    with Seen() as seen:
        torch.ops.npu.npu_rotary_mul_backward(x, x, table, table)
    assert seen.ran == [cast, cast, ("RotaryPositionEmbeddingGrad", 2 * 4096 * 2 + 2 * 2048 * 2)]


def test_a_token_is_rotated_where_it_lies_by_the_rows_of_the_table_that_it_needs() -> None:
    """2 tokens with 2 heads of 128 as part of wider rows, and positions of 8 bytes in a table of 512 rows."""
    wide, table = bf16(2, 1024), bf16(512, 128)
    q, k = wide[:, :256], wide[:, 256:512]
    positions = torch.tensor([3, 5], device="npu")
    with Seen() as seen:
        torch.ops.npu.npu_mrope(positions, q, k, table, 128)
    assert seen.ran == [("RopeWithSinCosCache", 4 * 512 * 2 + 2 * 128 * 2 + 2 * 8)]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_weights_of_experts_are_multiplied_as_they_lie(is_transposed: bool) -> None:
    """16 rows of 32 numbers through 4 matrices of 32 x 64, which no kernel copies, with 4 counts of 8 bytes."""
    x = bf16(16, 32)
    weight = bf16(4, 64, 32).mT if is_transposed else bf16(4, 32, 64)
    counts = torch.full((4,), 4, dtype=torch.int64, device="npu")
    with Seen() as seen:
        torch.ops.npu.npu_grouped_matmul(
            [x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
        )
    assert seen.ran == [("GroupedMatmul", (16 * 32 + 4 * 32 * 64 + 16 * 64) * 2 + 4 * 8)]


def test_rows_of_groups_are_summed_over_as_they_lie() -> None:
    x, grad = bf16(16, 32), bf16(16, 64)
    counts = torch.full((4,), 4, dtype=torch.int64, device="npu")
    with Seen() as seen:
        torch.ops.npu.npu_grouped_matmul(
            [x.t()], [grad], group_list=counts, split_item=3, group_type=2, group_list_type=1
        )
    assert seen.ran == [("GroupedMatmul", (16 * 32 + 16 * 64 + 4 * 32 * 64) * 2 + 4 * 8)]


def test_permuting_tokens_sorts_in_the_workspace() -> None:
    """8 tokens of 32 numbers to 2 experts each: 16 indices take 24 bytes, written and read."""
    tokens, indices = bf16(8, 32), torch.zeros(8, 2, dtype=torch.int32, device="npu")
    with Seen() as seen:
        torch.ops.npu.npu_moe_token_permute(tokens, indices)
    assert seen.ran == [("MoeTokenPermute", (8 + 16) * 32 * 2 + 2 * 16 * 4 + 2 * 16 * 24)]
    assert seen.runs[0].workspace == 16 * 24


def test_gradients_of_permutations_read_what_they_need() -> None:
    """16 rows of 32 numbers, of 8 tokens, with where they came from."""
    tokens, rows, weights = bf16(8, 32), bf16(16, 32), bf16(8, 2)
    indices, order = torch.zeros(8, 2, dtype=torch.int32, device="npu"), torch.arange(16, device="npu").int()
    with Seen() as seen:
        torch.ops.npu.npu_moe_token_permute_grad(tokens, rows, indices, order)
        torch.ops.npu.npu_moe_token_unpermute_grad(rows, rows, order)
        torch.ops.npu.npu_moe_token_unpermute_grad(rows, tokens, order, weights)
    assert seen.ran == [
        ("MoeTokenPermuteGrad", (16 + 8) * 32 * 2 + 16 * 4),
        ("MoeTokenUnpermuteGrad", (16 + 16) * 32 * 2 + 16 * 4),
        ("MoeTokenUnpermuteGrad", (16 + 8 + 16) * 32 * 2 + 16 * 4 + 2 * 16 * 2),
    ]


def test_scores_of_all_experts_are_written_where_they_are_asked_for() -> None:
    """4 rows of 256 scores of 4 bytes: 8 weights and 8 indices each, and all scores, or not."""
    x = torch.ones(4, 256, device="npu")
    for is_asked in (False, True):
        with Seen() as seen:
            torch.ops.npu.npu_moe_gating_top_k(x, 8, norm_type=1, out_flag=is_asked)
        assert seen.ran == [("MoeGatingTopK", (2 if is_asked else 1) * 4096 + 4 * 8 * 8)]


def test_what_is_put_into_a_cache_is_all_that_moves() -> None:
    """A token of 2 sequences, 2 heads and 64 numbers, and 3 elements of a vector, with indices of 4 and 8 bytes."""
    with FakeTensorMode():
        cache, token, values = bf16(2, 2, 1024, 64), bf16(2, 2, 1, 64), bf16(3)
        ends = torch.ones(2, dtype=torch.int32, device="npu")
        places = torch.ones(3, 1, dtype=torch.int64, device="npu")
        with Seen() as seen:
            torch.ops.npu.scatter_update_(cache, ends, token, -2)
            torch.ops.npu.npu_scatter_nd_update_(cache.view(-1), places, values)
    assert seen.ran == [("Scatter", 2 * 256 * 2 + 2 * 4), ("ScatterNdUpdate", 2 * 3 * 2 + 3 * 8)]


def test_dropout_writes_a_mask_of_bits_and_reads_it() -> None:
    """Of 1,024 elements of 2 bytes 128 bytes."""
    x = bf16(1024)
    with Seen() as seen:
        torch.ops.npu._npu_dropout(x, 0.5)
    assert seen.ran == [("DSAGenBitMask", 128), ("DropOutDoMask", 2 * 2048 + 128)]


def test_gradients_of_a_linear_layer_are_two_products() -> None:
    """8 rows of 32 numbers through 64 x 32: both read the gradient of 8 x 64."""
    x, weight, grad = bf16(8, 32), bf16(64, 32), bf16(8, 64)
    with Seen() as seen:
        torch.ops.npu.npu_linear_backward(grad, x, weight)
    assert seen.ran == [("MatMulV3", (512 + 2048 + 256) * 2), ("MatMulV3", (512 + 256 + 2048) * 2)]


def test_an_adam_step_reads_and_writes_three_tensors() -> None:
    """Of 256 numbers of 4 bytes, and reads a fourth."""
    parameter, first, second, grad = (torch.ones(256, device="npu") for _ in range(4))
    with Seen() as seen:
        torch.ops.npu.npu_apply_adam_w.out(
            0.9, 0.99, 1e-3, 0.0, 0.9, 0.99, 1e-8, grad, None, False, False, out=[parameter, first, second]
        )
    assert seen.ran == [("ApplyAdamW", (2 * 3 + 1) * 1024)]


def test_a_cast_reads_one_dtype_and_writes_another() -> None:
    x = bf16(256)
    with Seen() as seen:
        torch.ops.npu.npu_dtype_cast(x, torch.float32)
    assert seen.ran == [("Cast", 256 * (2 + 4))]
