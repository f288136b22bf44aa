"""What runs behind one call of torch_npu's fused operators, by the arithmetic of their sources."""

import pytest
import torch
from torch import Tensor

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
    assert seen.ran == [("StatelessDropOutGenMask", 1024), ("FlashAttentionScore", main)]


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
