"""q and k rotated together: what is kept with cos between layers is never out of date, and keeps nothing alive."""

import gc
import weakref
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.rope.test_rope_functional import exact
from tests.support import npu_counts


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(positions: int = 5, heads: tuple[int, int] = (4, 2), batch: int = 2) -> list[Tensor]:
    """q and k as attention has them, cos and sin, on the host."""
    q, k = (torch.randn(batch, positions, n, 64).transpose(1, 2) for n in heads)
    return [q, k, torch.randn(batch, positions, 64), torch.randn(batch, positions, 64)]


def moved(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to("npu") for tensor in tensors]


def assert_rotated(
    found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> None:
    """1e-6: two products and a sum in float32."""
    for a, x in zip(found, (q, k)):
        b = exact(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))
        assert a.shape == b.shape
        assert (a.detach().cpu() - b).norm() <= 1e-6 * b.norm()


def test_one_cos_serves_other_shapes_layouts_and_another_sin(kernel: ModuleType) -> None:
    """And is read again when it was written to; what is rotated may be written to."""
    q, k, cos, sin = draw()
    table, others = cos.npu(), [sin, sin + 1]
    for given, unsqueeze_dim in (((q, k), 1), ((q[:, :1], k), 1), ((q.contiguous(), k.contiguous()), 1), ((q, k), 1)):
        for other in others:
            leaves = [t.npu().requires_grad_() for t in given]
            found = kernel.apply_rotary_pos_emb(*leaves, table, other.npu(), unsqueeze_dim)
            assert_rotated([y.mul_(2) / 2 for y in found], *given, cos, other, unsqueeze_dim)
    by_position = [t.transpose(1, 2) for t in (q, k)]
    for _ in range(2):
        found = kernel.apply_rotary_pos_emb(*(t.npu() for t in by_position), table, sin.npu(), 2)
        assert_rotated(found, *by_position, table.cpu(), sin, 2)
        table.mul_(2)


@pytest.mark.parametrize("table", [2, 3], ids=["cos", "sin"])
def test_what_is_written_before_the_backward_is_an_error(kernel: ModuleType, table: int) -> None:
    """As with any tensor that a gradient is made of; tables that are filled anew for every batch would do it."""
    given = moved(draw())
    given[0].requires_grad_()
    rotated = kernel.apply_rotary_pos_emb(*given)[0].sum()
    given[table].zero_()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*call backward"):
        rotated.backward()


def test_a_cos_that_needs_a_gradient_later_gets_one(kernel: ModuleType) -> None:
    q, k, cos, sin = moved(draw())
    kernel.apply_rotary_pos_emb(q, k, cos, sin)
    cos.requires_grad_()
    kernel.apply_rotary_pos_emb(q, k, cos, sin)[0].sum().backward()
    assert torch.allclose(cos.grad, q.sum(1))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_cos_and_sin_live_no_longer_than_they_would(kernel: ModuleType, requires_grad) -> None:
    q, k, cos, sin = moved(draw())
    q.requires_grad_(requires_grad)
    tables = [weakref.ref(cos), weakref.ref(sin)]
    rotated = kernel.apply_rotary_pos_emb(q, k, cos, sin)
    if requires_grad:
        rotated[0].sum().backward()
    del cos, sin, rotated
    gc.collect()
    assert [table() for table in tables] == [None, None]


def test_no_hidden_work_for_what_needs_none(kernel: ModuleType) -> None:
    q, k, cos, sin = moved(draw())
    npu_counts.reset()
    sum(y.sum() for y in kernel.apply_rotary_pos_emb(q.requires_grad_(), k, cos, sin)).backward()
    assert npu_counts.read()["npu_rotary_mul_backward"] == 1
