"""rotary_mul and its companions against float64: values, gradients, launches, layouts, limits, errors."""

import math
from collections import Counter
from types import ModuleType

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_ext_npu.measuring.costs import Cost
from tests.support import npu_counts
from tests.support.rounding import FLOAT32, ROUNDING, assert_rounded, launched


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def exact(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The rotation of pairs (a, b) to (a·cos − b·sin, b·cos + a·sin), each with its own cos and sin."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    pairs = (lambda t: t.unflatten(-1, (-1, 2)).unbind(-1)) if interleaved else (lambda t: t.chunk(2, -1))
    shape = torch.broadcast_shapes(x.shape, cos.shape)
    (a, b), (ca, cb), (sa, sb) = (pairs(t.expand(shape)) for t in (x, cos, sin))
    rotated = a * ca - b * sa, b * cb + a * sb
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


def draw(x: tuple, cos: tuple, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in (x, cos, cos)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "cos_sizes"),
    [
        ((2, 4, 8, 64), (2, 1, 8, 64)),
        ((2, 4, 8, 64), (1, 1, 8, 64)),
        ((2, 8, 4, 64), (2, 8, 1, 64)),
        ((2, 8, 4, 64), (1, 8, 1, 64)),
        ((8, 4, 80), (8, 1, 80)),
        ((2, 4, 8, 64), (8, 64)),
        ((4, 8, 64), (8, 64)),
    ],
)
def test_is_one_launch_with_one_rounding(kernel: ModuleType, shape, cos_sizes, dtype, interleaved) -> None:
    x, cos, sin = draw(shape, cos_sizes, dtype)
    moved = x.to("npu"), cos.to("npu"), sin.to("npu")
    y = kernel.rotary_mul(*moved, interleaved)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert_rounded(y, exact(x, cos, sin, interleaved))
    if interleaved and len(cos_sizes) == 4 and cos_sizes[0] == 2 and cos_sizes[1] == 1:
        return  # a cos for each row of the batch, with heads in between: see below
    assert launched(lambda: kernel.rotary_mul(*moved, interleaved)) == {"npu_rotary_mul": 1}


@pytest.mark.parametrize("batch", [1, 2, 64])
@pytest.mark.parametrize("positions", [1, 7, 33])
@pytest.mark.parametrize("tables", ["shared", "each row"])
def test_attention_of_transformers_is_one_launch_each_and_no_copy(kernel: ModuleType, batch, positions, tables) -> None:
    """q and k are [B, N, S, D] views of [B, S, N, D] memory, k with one head, several or all of them."""
    for heads in (1, 2, 8):
        q, cos, sin = draw((batch, positions, 8, 64), (batch if tables == "each row" else 1, positions, 64))
        k = torch.randn(batch, positions, heads, 64)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        moved = [t.to("npu") for t in (q, k, cos, sin)]
        rotated = kernel.apply_rotary_pos_emb(*moved)
        for found, x in zip(rotated, (q, k)):
            assert found.shape == x.shape
            assert_rounded(found, exact(x, cos.unsqueeze(1), sin.unsqueeze(1)))
            if heads > 1 and positions > 1:
                assert found.stride() == x.stride()  # the view that attention expects
        found = launched(lambda moved=moved: kernel.apply_rotary_pos_emb(*moved))
        assert found == {"npu_rotary_mul": 2}


@pytest.mark.parametrize(
    ("shape", "cos_sizes", "why"),
    [
        ((2, 4, 8, 896), (2, 1, 8, 896), "a head of 896"),
        ((2, 1000, 1, 8), (2, 1, 1, 8), "1000 heads"),
        ((0, 4, 3, 64), (0, 1, 3, 64), "nothing at all"),
        ((1, 4, 3, 64), (2, 1, 3, 64), "a table that is larger than x"),
    ],
)
def test_beyond_the_limits_it_is_the_same_formula_in_torch(kernel: ModuleType, shape, cos_sizes, why) -> None:
    x, cos, sin = draw(shape, cos_sizes)
    moved = x.to("npu"), cos.to("npu"), sin.to("npu")
    found = launched(lambda: kernel.rotary_mul(*moved))
    assert "npu_rotary_mul" not in found, why
    assert found.get("stream_syncs", 0) == 0
    assert_rounded(kernel.rotary_mul(*moved), exact(x, cos, sin))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_the_shapes_the_device_refuses_nothing(kernel: ModuleType, data: st.DataObject) -> None:
    """The software device refuses what breaks a limit: the guards have to know all of them."""
    sizes = [data.draw(st.sampled_from([1, 2, 3, 8, 9, 40])) for _ in range(data.draw(st.integers(1, 4)))]
    assume(math.prod(sizes) <= 4000)  # no limit depends on more, and large tensors take long
    head_size = data.draw(st.sampled_from([2, 6, 8, 16, 64, 80, 96]))
    cos_sizes = [data.draw(st.sampled_from([1, size])) for size in sizes]
    cos_sizes = cos_sizes[data.draw(st.integers(0, len(cos_sizes))) :]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    x, cos, sin = draw((*sizes, head_size), (*cos_sizes, head_size), dtype)
    if len(sizes) > 2 and data.draw(st.booleans()):
        x, cos = x.transpose(-2, -3), cos if cos.dim() < 3 else cos.transpose(-2, -3)
        sin = sin if sin.dim() < 3 else sin.transpose(-2, -3)
    if cos.dim() == 2 and x.dim() > 2 and cos.shape[0] not in (1, x.shape[-2]):
        return  # does not broadcast
    interleaved = data.draw(st.booleans())
    leaf = x.to("npu").requires_grad_()
    y = kernel.rotary_mul(leaf, cos.to("npu"), sin.to("npu"), interleaved)
    expected = exact(x, cos, sin, interleaved)
    assert y.shape == expected.shape
    # in torch, beyond the limits, bfloat16 rounds three times: one of the products can be larger than the result
    assert ((y.cpu().double() - expected).abs() <= 4 * ROUNDING[dtype] * (expected.abs() + 4) + FLOAT32).all()
    y.backward(torch.ones_like(y))
    assert not leaf.grad.isnan().any()


def test_multimodal_tables_are_composed_in_a_launch_each(kernel: ModuleType) -> None:
    q, cos, sin = (t.npu() for t in draw((2, 5, 4, 16), (3, 2, 5, 16)))
    q, section = q.transpose(1, 2), [2, 3, 3]
    found = launched(lambda: kernel.apply_multimodal_rotary_pos_emb(q, q, cos, sin, section))
    assert found == {"cat": 2, "npu_rotary_mul": 2}
    assert section == [2, 3, 3]


HEADS, SMALL, WIDE = (1, 2, 3, 8), (1, 3, 8), (1, 3, 16)  # of q and k, and of cos and sin
BAD_SHAPES = [
    ("rotary_mul", [(2, 3, 5), (2, 1, 5), (2, 1, 5)], r"cos \[2, 1, 5\].*even"),
    ("rotary_mul", [(2, 3, 5), (2, 1, 4), (2, 1, 4)], r"x \[2, 3, 5\].*even"),
    ("rotary_mul", [(2, 3, 8), (2, 1, 4), (2, 1, 4)], r"cos \[2, 1, 4\] must have the head size of x \[2, 3, 8\]"),
    ("rotary_mul", [(2, 3, 8), (2, 1, 8), (2, 3, 8)], r"sin \[2, 3, 8\] must have the shape of cos \[2, 1, 8\]"),
    ("apply_rotary_pos_emb", [HEADS, (1, 2, 3, 4), SMALL, SMALL], r"must have the head size of k \[1, 2, 3, 4\]"),
    (
        "apply_multimodal_rotary_pos_emb",
        [HEADS, HEADS, (3, *SMALL), (3, *SMALL), [1, 1, 1]],
        r"mrope_section \[1, 1, 1\] must add up to half the head size",
    ),
    (
        "apply_multimodal_rotary_pos_emb",
        [HEADS, HEADS, SMALL, SMALL, [1, 1, 2]],
        r"cos \[1, 3, 8\] must be \[3, B, S, D\]",
    ),
    ("rotary_mul", [HEADS, (1, 1, 4, 8), (1, 1, 4, 8)], r"cos and sin must broadcast to what is rotated"),
    ("RotaryPosEmbPartial", [HEADS, HEADS, WIDE, WIDE], r"cos \[1, 3, 16\] must have at most the head size of q"),
    ("RotaryPosEmbHalfWidth", [HEADS, HEADS, SMALL, SMALL], r"cos \[1, 3, 8\] must have half the head size of q"),
    ("RotaryPosEmbPatches", [HEADS, HEADS, (4, 8), (4, 8)], r"q \[1, 2, 3, 8\].*at least as many as cos \[4, 8\]"),
]


@pytest.mark.parametrize(("name", "shapes", "message"), BAD_SHAPES)
def test_bad_shapes_are_named_before_any_operator_runs(kernel: ModuleType, name, shapes, message) -> None:
    call = getattr(kernel, name, None) or getattr(kernel.layers, name)()
    npu_counts.reset()
    with pytest.raises(ValueError, match=message):
        call(*(torch.ones(each, device="npu") if isinstance(each, tuple) else each for each in shapes))
    ran = {name for name, count in npu_counts.read().items() if count}
    assert ran <= {"fill_", "ones", "ones.out", "stream_syncs"}  # the arguments themselves


def test_tables_of_integers_are_named(kernel: ModuleType) -> None:
    x, cos = torch.ones(2, 3, 8, device="npu"), torch.ones(2, 1, 8, device="npu")
    with pytest.raises(TypeError, match=r"sin \[2, 1, 8\] must be floating point, got torch.int32"):
        kernel.rotary_mul(x, cos, cos.int())


@pytest.mark.parametrize("heads_last", [True, False])
def test_a_part_of_a_head_is_put_back_in_one_pass_each_way(kernel: ModuleType, heads_last: bool) -> None:
    """And lies as it did, so that neither attention nor a product copies it."""
    x = torch.randn((2, 6, 3, 64) if heads_last else (2, 3, 6, 64), device="npu", requires_grad=True)
    cos, sin = (torch.randn(2, 6, 32, device="npu") for _ in range(2))
    q = x.transpose(1, 2) if heads_last else x
    layer = kernel.layers.RotaryPosEmbPartial()
    with Cost() as cost:
        y, _ = layer.forward(q, q.detach(), cos, sin)
        y.backward(torch.ones_like(y))
    assert dict(cost.launches - Counter(["ones_like"])) == {"npu_rotary_mul": 2, "npu_rotary_mul_backward": 1, "cat": 3}
    assert y.stride() == q.stride()
    assert x.grad.stride() == x.stride()
