"""The older operators that lay tensors out anew against numpy."""

import numpy as np
import pytest
import torch
import torch_npu

X = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: torch_npu.npu_transpose(x, [2, 0, 1]), X.permute(2, 0, 1)),
        (lambda x: torch_npu.npu_reshape(x, [4, 6]), X.reshape(4, 6)),
        (lambda x: torch_npu.npu_slice(x, [0, 1, 1], [2, 2, -1]), X.numpy()[:, 1:3, 1:]),
        (lambda x: torch_npu.npu_pad(x, [1, 0, 0, 2, 0, 1]), np.pad(X.numpy(), ((1, 0), (0, 2), (0, 1)))),
        (lambda x: torch_npu.npu_broadcast(x[:, :1], [2, 5, 4]), X[:, :1].expand(2, 5, 4)),
        (lambda x: torch_npu.npu_confusion_transpose(x, [2, 0, 1], [4, 6], True), X.permute(2, 0, 1).reshape(4, 6)),
        (lambda x: torch_npu.npu_confusion_transpose(x, [1, 0], [6, 4], False), X.reshape(6, 4).T),
        (lambda x: torch_npu.npu_max(x, 1)[0], np.max(X.numpy(), 1)),
        (lambda x: torch_npu.npu_max(x, 1)[1], np.argmax(X.numpy(), 1)),
        (lambda x: torch_npu.npu_min(x, 2, True)[0], np.min(X.numpy(), 2, keepdims=True)),
        (lambda x: torch_npu.npu_bmmV2(x, x.mT.contiguous(), [6, 3]), (X @ X.mT).reshape(6, 3)),
        (lambda x: torch_npu.one_(x.clone()), np.ones((2, 3, 4))),
    ],
)  # fmt: skip
def test_results_are_numpys(call, expected) -> None:
    found = call(X.npu())
    assert found.is_contiguous()
    np.testing.assert_array_equal(found.cpu().numpy(), np.asarray(expected))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch_npu.npu_confusion_transpose(x, [2, 0, 1], [4, 6], True),
        lambda x: torch_npu.npu_confusion_transpose(x, [2, 1, 0], [4, 3, 2], False),
        lambda x: torch_npu.npu_max(x, 1)[0],
        lambda x: torch_npu.npu_min(x, 2, True)[0],
    ],
)
def test_gradients_go_back_to_where_the_elements_were(call) -> None:
    x = X.npu().requires_grad_()
    call(x).mul(2).sum().backward()
    y = call(X.npu())
    assert x.grad.sum().item() == 2 * y.numel()
    assert set(X[x.grad.cpu() > 0].tolist()) == set(y.flatten().tolist())
