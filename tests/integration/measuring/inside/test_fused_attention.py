"""What runs behind one call of attention, by the arithmetic of its sources."""

import pytest
import torch
from torch import Tensor

from tests.integration.measuring.inside.recorder import Recorder, bf16


def attend(q: Tensor, k: Tensor, v: Tensor, layout: str = "BNSD", **given):
    heads = q.shape[layout.index("N")]
    return torch.ops.npu.npu_fusion_attention(q, k, v, heads, layout, None, None, None, 0.1, **given)


def test_attention_pads_heads_that_its_kernel_does_not_take() -> None:
    """Latents of 576 become 640 of 2 bytes, and values of 512 for up to 1,024 keys too, which is cut from the result.

    Queries are 4 x 16 rows, keys and values 64; statistics are two times eight numbers of 4 bytes a row.
    """
    q, k, v = bf16(1, 4, 16, 576), bf16(1, 1, 64, 576), bf16(1, 1, 64, 512)
    with Recorder() as seen:
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
    with Recorder() as seen:
        attend(q, k, k)
    every = [] if width == padded else [("PadV3", 32 * (width + padded) * 2)] * 3
    cut = [] if width == padded else [("Slice", 32 * (width + padded) * 2)]
    main = ("FlashAttentionScore", 4 * 32 * padded * 2 + 32 * 2 * 8 * 4)
    assert seen.ran == [*every, main, *cut]


def test_attention_transposes_what_is_farther_than_65535_elements_apart() -> None:
    """128 heads of 512 are 65,536 elements of 2 bytes a token."""
    q = bf16(1, 2, 128, 512)
    with Recorder() as seen:
        attend(q, q, q, "BSND")
    size = 2 * 65536 * 2
    statistics = 2 * 128 * 2 * 8 * 4
    transposes = [("Transpose", 2 * size)] * 3
    assert seen.ran == [*transposes, ("FlashAttentionScore", 4 * size + statistics), ("Transpose", 2 * size)]


def test_attention_with_dropout_writes_a_mask_of_bits() -> None:
    """2 x 64 queries and 64 keys make 8,192 bits, which are written and read."""
    q = bf16(1, 2, 64, 64)
    with Recorder() as seen:
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
    with Recorder() as seen:
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
    with Recorder() as seen:
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
    with Recorder() as seen:
        attend(q, q, q, "TND", actual_seq_qlen=[8, 40], actual_seq_kvlen=[8, 40])
    assert seen.ran == [("FlashAttentionScore", 4 * 80 * width * 2 + 80 * 2 * 8 * 4)]


def test_short_packed_attention_of_narrow_heads_is_not_padded() -> None:
    """Heads of 72 in sequences of up to 1,024 keys; in longer ones they become 80."""
    q = bf16(1100, 1, 72)
    for ends, padded in (([600, 1100], 72), ([1100], 80)):
        with Recorder() as seen:
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
            with Recorder() as seen:
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
    with Recorder() as seen:
        attend(q, q, q)
    assert seen.ran[:3] == [("Transpose", 2 * 2048 * 2)] * 3
    assert len(seen.ran) == 4
