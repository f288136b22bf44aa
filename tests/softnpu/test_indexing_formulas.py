"""One-hot rows, updates by index, the filter of a sampler, a masked softmax and a step of AdamW."""

import math

import pytest
import torch
import torch_npu


def test_one_hot_is_float32_with_the_classes_last() -> None:
    found = torch_npu.npu_one_hot(torch.tensor([[0, 2], [5, 1]]).to("npu"), depth=3, on_value=2, off_value=-1)
    expected = torch.full((2, 2, 3), -1.0)
    for place in ((0, 0, 0), (0, 1, 2), (1, 1, 1)):
        expected[place] = 2.0
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_updates_by_index(depth) -> None:
    x = torch.arange(60.0).view(3, 4, 5)
    indices = torch.tensor([[0, 3, 1], [2, 0, 4]])[:, :depth]
    updates = -torch.ones(2, *x.shape[depth:])
    expected = x.clone()
    for index in indices.tolist():
        expected[tuple(index)] = -1
    source = x.to("npu")
    assert torch.equal(torch_npu.npu_scatter_nd_update(source, indices.to("npu"), updates.to("npu")).cpu(), expected)
    assert torch.equal(source.cpu(), x)
    torch_npu.npu_scatter_nd_update_(source, indices.to("npu"), updates.to("npu"))
    assert torch.equal(source.cpu(), expected)


@pytest.mark.parametrize(
    ("axis", "shape"), [(-2, (2, 3, 2, 16)), (2, (2, 3, 1, 16)), (-1, (2, 3, 5, 4)), (1, (2, 1, 5, 16))]
)
@pytest.mark.parametrize("pairs", [False, True])
def test_updates_from_an_index_on(axis, shape, pairs) -> None:
    """Of each sequence in turn, or of those that the indices name."""
    x, updates = torch.arange(480.0).view(2, 3, 5, 16), -torch.ones(shape)
    begins, rows = ([3, 0], [1, 0]) if axis in (-2, 2) else ([1, 2], [1, 0])
    expected = x.clone()
    for number, begin in enumerate(begins):
        row = rows[number] if pairs else number
        expected[row].narrow(axis % 4 - 1, begin, shape[axis]).fill_(-1)
    indices = torch.tensor([*zip(rows, begins)] if pairs else begins)
    source = x.to("npu")
    found = torch_npu.scatter_update(source, indices.to("npu"), updates.to("npu"), axis)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(source.cpu(), x)
    torch_npu.scatter_update_(source, indices.to("npu"), updates.to("npu"), axis)
    assert torch.equal(source.cpu(), expected)


@pytest.mark.parametrize(("p", "k"), [(0.6, None), (None, 3), (0.6, 3), (0.0, 4), (1.0, 5)])
def test_a_sampler_keeps_the_largest(p, k) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 9)
    given = {
        "p": None if p is None else torch.full((4,), p).to("npu"),
        "k": None if k is None else torch.full((4,), k, dtype=torch.int32).to("npu"),
    }
    found = torch_npu.npu_top_k_top_p(logits.to("npu"), **given).cpu()
    for row, result in zip(logits.double(), found):
        order = row.argsort(descending=True)[: k or 9]
        kept = order
        if p is not None:  # kept as long as those from it to the smallest hold more than 1 - p
            tail = torch.softmax(row[order], -1).flip(0).cumsum(0).flip(0)
            kept = order[(tail > 1 - p) | (torch.arange(len(order)) == 0)]
        expected = torch.full((9,), -math.inf)
        expected[kept] = row[kept].float()
        assert torch.equal(result, expected)


def test_masked_softmax_and_its_gradient() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 3, 32, 64), torch.rand(2, 1, 32, 64) < 0.5
    on_device, leaf = x.to("npu").requires_grad_(), x.double().requires_grad_()
    found = torch_npu.npu_scaled_masked_softmax(on_device, mask.to("npu"), 0.3)
    expected = torch.softmax((0.3 * leaf).masked_fill(mask, -math.inf), -1)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-7)  # sums of 64 float32
    grad = torch.randn(found.shape)
    found.backward(grad.to("npu"))
    expected.backward(grad.double())
    torch.testing.assert_close(on_device.grad.cpu().double(), leaf.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("maximize", [False, True])
def test_steps_of_adamw_are_torchs(maximize) -> None:
    torch.manual_seed(0)
    start = torch.randn(7)
    reference = start.double().requires_grad_()
    optimizer = torch.optim.AdamW(
        [reference], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, maximize=maximize, foreach=False
    )
    var, m, v = start.to("npu"), torch.zeros(7, device="npu"), torch.zeros(7, device="npu")
    for step in range(3):
        grad = torch.randn(7)
        reference.grad = grad.double()
        optimizer.step()
        powers = (0.8**step, 0.9**step)
        returned = torch_npu.npu_apply_adam_w(
            *powers, 0.1, 0.2, 0.8, 0.9, 1e-3, grad.to("npu"), None, None, maximize, out=(var, m, v)
        )
        assert all(a is b for a, b in zip(returned, (var, m, v)))
        # the scalars are float32: 1 - 0.9 has a relative error of 1e-7 / 0.1
        torch.testing.assert_close(var.cpu().double(), reference.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_adam_of_three_steps_is_that_of_torch(nesterov) -> None:
    """Without epsilon, which the device adds to the moment before its bias is corrected and torch after."""
    torch.manual_seed(0)
    start = torch.randn(7)
    reference = start.double()
    first, second = torch.zeros(2, 7, dtype=torch.float64)
    var, m, v = start.to("npu"), torch.zeros(7, device="npu"), torch.zeros(7, device="npu")
    for step in range(1, 4):
        grad = torch.randn(7)
        g, powers = grad.double(), (0.8**step, 0.9**step)
        first, second = 0.8 * first + 0.2 * g, 0.9 * second + 0.1 * g * g
        ahead = 0.8 * first + 0.2 * g if nesterov else first
        reference = reference - 0.1 * ahead / (1 - powers[0]) / (second / (1 - powers[1])).sqrt()
        torch_npu.npu_apply_adam(*powers, 0.1, 0.8, 0.9, 0.0, grad.to("npu"), False, nesterov, out=(var, m, v))
        # the scalars are float32: 1 - 0.9 has a relative error of 1e-7 / 0.1
        torch.testing.assert_close(var.cpu().double(), reference, rtol=1e-5, atol=1e-5)
