"""npu_cross_entropy_loss against torch's cross entropy in float64."""

import pytest
import torch
import torch_npu
from torch.nn import functional as F

# float32 inside; the loss, and log_prob before the gradient, are rounded to the dtype: 2^-9 of numbers up to 8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


def drawn(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 11).to(dtype), torch.tensor([3, 0, 10, 4, 4, 1]), torch.rand(11) + 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss(dtype, reduction, ignored, weighted) -> None:
    x, target, weight = drawn(dtype)
    target[0] = ignored
    for smoothing in (0.0, 0.2):
        given = {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}
        loss, log_prob, *others = torch_npu.npu_cross_entropy_loss(
            x.to("npu"), target.to("npu"), weight.to("npu") if weighted else None, **given
        )
        expected = F.cross_entropy(x.double(), target, weight.double() if weighted else None, **given)
        assert loss.shape == ((6,) if reduction == "none" else (1,))
        torch.testing.assert_close(
            loss.cpu().double(), expected.view_as(loss), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        expected = torch.log_softmax(x.double(), -1)
        torch.testing.assert_close(log_prob.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert [t.numel() for t in others] == [0, 0]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient(dtype, reduction) -> None:
    x, target, weight = drawn(dtype)
    options = {"reduction": reduction}
    if reduction != "mean":
        options |= {"ignore_index": 4}
    weight = None if reduction == "mean" else weight
    on_device, leaf = x.to("npu").requires_grad_(), x.double().requires_grad_()
    loss = torch_npu.npu_cross_entropy_loss(
        on_device, target.to("npu"), None if weight is None else weight.to("npu"), **options
    )[0]
    expected = F.cross_entropy(leaf, target, None if weight is None else weight.double(), **options)
    grad = torch.linspace(-1, 1, 6) if reduction == "none" else torch.tensor([1.5])
    loss.backward(grad.to(loss))
    expected.backward(grad.double().view_as(expected))
    torch.testing.assert_close(on_device.grad.cpu().double(), leaf.grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_gradient_operator_takes_smoothing_and_weights() -> None:
    x, target, weight = drawn()
    leaf = x.double().requires_grad_()
    F.cross_entropy(leaf, target, weight.double(), label_smoothing=0.2, ignore_index=4).backward()
    dx = torch.ops.npu.npu_cross_entropy_loss_backward(
        torch.ones(1, device="npu"), torch.log_softmax(x, -1).to("npu"), target.to("npu"), weight.to("npu"),
        ignore_index=4, label_smoothing=0.2,
    )  # fmt: skip
    torch.testing.assert_close(dx.cpu().double(), leaf.grad, rtol=2e-6, atol=2e-6)
