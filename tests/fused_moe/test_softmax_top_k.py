"""softmax_top_k against torch.softmax and torch.topk in float64, and the routers that call it."""

import pytest
import torch
from torch import Tensor

import softnpu


def exact(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    weights, experts = logits.double().softmax(-1).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, experts


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 4, 4), (33, 128, 8), (7, 257, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_and_experts_of_inference_are_exact(kernel, dtype, sizes, renormalise) -> None:
    """In float32 whatever the logits are: to 1e-6, for exponentials and a sum in float32."""
    tokens, experts, k = sizes
    logits = torch.stack([torch.randperm(experts) for _ in range(tokens)]).to(dtype) / 16  # no two are equal
    softnpu.reset_counters()
    weights, indices = kernel.softmax_top_k(logits.npu(), k, renormalise)
    counters = softnpu.counters()
    assert counters["npu_moe_gating_top_k_softmax"] == 1
    assert counters["stream_syncs"] == 0
    assert (weights.dtype, indices.dtype) == (torch.float32, torch.int64)
    expected, chosen = exact(logits, k, renormalise)
    assert torch.equal(indices.cpu(), chosen)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-6, atol=1e-7)


def test_of_equal_experts_the_first_ones_are_chosen(kernel) -> None:
    _, indices = kernel.softmax_top_k(torch.zeros(2, 9, device="npu"), 4)
    assert indices.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("logits", "k", "error", "message"),
    [
        (torch.zeros(2, 3, 4), 2, ValueError, "logits must be [T, E] and k from 1 to E, got [2, 3, 4] and k = 2"),
        (torch.zeros(2, 3), 4, ValueError, "got [2, 3] and k = 4"),
        (torch.zeros(2, 3), 0, ValueError, "got [2, 3] and k = 0"),
        (torch.zeros(2, 3).long(), 1, TypeError, "must be floating point, got torch.int64"),
    ],
)
def test_wrong_arguments_are_named(kernel, logits, k, error, message) -> None:
    with pytest.raises(error) as caught:
        kernel.softmax_top_k(logits, k)
    assert message in str(caught.value)
