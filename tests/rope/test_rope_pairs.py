"""q and k rotated together: what is kept with cos between layers is never out of date, and keeps nothing alive."""

import gc
import weakref
from types import ModuleType

import pytest
import torch
from torch import Tensor

import softnpu


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(positions: int = 5, heads: tuple[int, int] = (4, 2), batch: int = 2) -> list[Tensor]:
    """q and k as attention has them, cos and sin, on the host."""
    q, k = (torch.randn(batch, positions, n, 64).transpose(1, 2) for n in heads)
    return [q, k, torch.randn(batch, positions, 64), torch.randn(batch, positions, 64)]


def moved(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to("npu") for tensor in tensors]


def expected(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> list[Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return [x * cos + torch.cat((-x[..., 32:], x[..., :32]), -1) * sin for x in (q, k)]


def assert_rotated(found: tuple[Tensor, Tensor], *arguments) -> None:
    """1e-6: two products and a sum in float32."""
    for a, b in zip(found, expected(*arguments)):
        assert a.shape == b.shape
        assert (a.detach().cpu() - b).norm() <= 1e-6 * b.norm()


def test_layers_of_one_shape_look_at_cos_and_sin_once(kernel: ModuleType) -> None:
    arguments = draw()
    q, k, cos, sin = moved(arguments)
    for _ in range(3):
        softnpu.reset_counters()
        assert_rotated(kernel.apply_rotary_pos_emb(q, k, cos, sin), *arguments)
        assert {name: n for name, n in softnpu.counters().items() if n and "rotary" in name} == {"npu_rotary_mul": 2}


def test_one_cos_serves_other_shapes_layouts_and_another_sin(kernel: ModuleType) -> None:
    q, k, cos, sin = draw()
    table, others = cos.npu(), [sin, sin + 1]
    for given, unsqueeze_dim in (((q, k), 1), ((q[:, :1], k), 1), ((q.contiguous(), k.contiguous()), 1), ((q, k), 1)):
        for other in others:
            found = kernel.apply_rotary_pos_emb(*(t.npu() for t in given), table, other.npu(), unsqueeze_dim)
            assert_rotated(found, *given, cos, other, unsqueeze_dim)
    by_position = [t.transpose(1, 2) for t in (q, k)]
    for _ in range(2):
        found = kernel.apply_rotary_pos_emb(*(t.npu() for t in by_position), table, sin.npu(), 2)
        assert_rotated(found, *by_position, cos, sin, 2)


def test_a_cos_that_is_written_to_is_read_anew(kernel: ModuleType) -> None:
    q, k, cos, sin = draw()
    given = moved([q, k, cos, sin])
    kernel.apply_rotary_pos_emb(*given)
    given[2].mul_(2)
    given[3].add_(1)
    assert_rotated(kernel.apply_rotary_pos_emb(*given), q, k, 2 * cos, sin + 1)


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


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_each_gets_its_own_gradient(kernel: ModuleType, contiguous, needs, used) -> None:
    arguments = draw()
    results = []
    for rotate, given in ((kernel.apply_rotary_pos_emb, moved(arguments)), (expected, arguments)):
        leaves = [(t.contiguous() if contiguous else t).detach().requires_grad_(n) for t, n in zip(given, needs)]
        rotated = [y for y, is_used in zip(rotate(*leaves, *given[2:]), used) if is_used]
        if any(y.requires_grad for y in rotated):
            sum(y.square().sum() for y in rotated).backward()
        results.append([leaf.grad for leaf in leaves])
    for found, truth in zip(*results):
        if truth is None or not truth.any():
            assert found is None or not found.any()
        else:
            assert (found.cpu() - truth).norm() <= 1e-6 * truth.norm()


@pytest.mark.parametrize("contiguous", [False, True])
def test_results_can_be_written_to(kernel: ModuleType, contiguous: bool) -> None:
    """The gradient is that of what was written, and q and k are as before."""
    q, k, cos, sin = draw()
    q, k = (t.contiguous() if contiguous else t for t in (q, k))
    leaf, other, direction = q.npu().requires_grad_(), k.npu(), torch.randn(q.shape)
    a, b = kernel.apply_rotary_pos_emb(leaf, other, cos.npu(), sin.npu())
    (a.mul_(2) * direction.npu()).sum().backward()
    b.mul_(2)
    assert_rotated((a / 2, b / 2), q, k, cos, sin)
    assert torch.equal(leaf.detach().cpu(), q)
    assert torch.equal(other.cpu(), k)
    truth = q.clone().requires_grad_()
    (2 * expected(truth, k, cos, sin)[0] * direction).sum().backward()
    assert (leaf.grad.cpu() - truth.grad).norm() <= 1e-6 * truth.grad.norm()


def test_no_hidden_work_for_what_needs_none(kernel: ModuleType) -> None:
    q, k, cos, sin = moved(draw())
    softnpu.reset_counters()
    sum(y.sum() for y in kernel.apply_rotary_pos_emb(q.requires_grad_(), k, cos, sin)).backward()
    assert softnpu.counters()["npu_rotary_mul_backward"] == 1
