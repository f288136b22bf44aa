"""gating_top_k against its formula in float64, with its gradient, and beyond what the operator takes."""

import pytest
import torch
from torch import Tensor

from tests.support import npu_counts

OPERATOR = "npu_moe_gating_top_k"


def exact(logits: Tensor, k: int, bias: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
    """The weights of all experts, ``[T, E]`` in float64 with zeros for the others, and the chosen ones, sorted."""
    logits = logits.double()
    scores = logits.softmax(-1) if options.get("scores") == "softmax" else logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias.double()
    groups = options.get("groups", 1)
    if groups > 1:
        parts = choice.unflatten(-1, (groups, -1)).sort(-1, descending=True).values
        best = parts[..., 0] if options.get("group_scores") == "best" else parts[..., :2].sum(-1)
        lowest = best.sort(-1, descending=True).values[:, options.get("top_groups", 1) - 1].unsqueeze(-1)
        choice = choice.masked_fill((best < lowest).repeat_interleave(choice.shape[-1] // groups, -1), -torch.inf)
    experts = choice.argsort(-1, descending=True)[:, :k]
    chosen = scores.gather(-1, experts)
    if options.get("renormalise", True):
        chosen = chosen / (chosen.sum(-1, keepdim=True) + options.get("epsilon", 1e-20))
    return torch.zeros_like(scores).scatter(-1, experts, chosen * options.get("scale", 1.0)), experts.sort().values


CASES = {
    "sigmoid": ({"k": 3}, False),
    "sigmoid, bias, groups": ({"k": 5, "groups": 4, "top_groups": 2, "scale": 2.5}, True),
    "sigmoid, best groups": ({"k": 4, "groups": 2, "group_scores": "best"}, True),
    "sigmoid, undivided": ({"k": 3, "renormalise": False, "scale": 0.5}, True),
    "sigmoid, no epsilon": ({"k": 2, "epsilon": 0.0}, False),
    "softmax": ({"k": 4, "scores": "softmax", "renormalise": False, "scale": 3.0}, False),
    "softmax, bias": ({"k": 4, "scores": "softmax", "renormalise": False}, True),
    "softmax, groups": ({"k": 4, "scores": "softmax", "groups": 4, "top_groups": 2, "scale": 2.0}, False),
    "softmax, best groups": (
        {"k": 4, "scores": "softmax", "groups": 4, "top_groups": 2, "group_scores": "best", "renormalise": False},
        False,
    ),
}


@pytest.mark.parametrize("device", ["npu", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_weights_experts_and_gradients_are_those_of_float64(kernel, name, device) -> None:
    """To 1e-6: exponentials, a sum and a quotient in float32."""
    options, biased = CASES[name]
    torch.manual_seed(0)
    logits, grad = torch.randn(19, 16), torch.randn(19, 16)
    bias = torch.randn(16) / 4 if biased else None
    truth = logits.double().requires_grad_()
    expected, chosen = exact(truth, bias=bias, **options)
    (expected * grad).sum().backward()
    leaf = logits.to(device, copy=True).requires_grad_()
    bias = None if bias is None else bias.to(device)
    for trains in (False, True):
        npu_counts.reset()
        with torch.set_grad_enabled(trains):
            weights, experts = kernel.gating_top_k(leaf, bias=bias, **options)
        counters = npu_counts.read()
        assert counters.get(OPERATOR, 0) == (device == "npu")
        assert counters.get("stream_syncs", 0) == 0
        assert (weights.dtype, experts.dtype, weights.requires_grad) == (torch.float32, torch.int64, trains)
        assert torch.equal(experts.cpu().sort().values, chosen)
        found = torch.zeros(19, 16).scatter(-1, experts.cpu(), weights.detach().cpu()).double()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-9)
    weights.backward(grad.to(device).gather(-1, experts))
    assert (leaf.grad.cpu().double() - truth.grad).norm() <= 1e-6 * truth.grad.norm()


@pytest.mark.parametrize("name", CASES)
def test_its_gradient_has_a_gradient(kernel, name) -> None:
    options, biased = CASES[name]
    torch.manual_seed(1)
    logits, bias = torch.randn(5, 16), torch.randn(16) / 4 if biased else None
    found = []
    for each, function in ((logits.npu(), kernel.gating_top_k), (logits.double(), exact)):
        leaf = each.requires_grad_()
        options_here = options | {"bias": None if bias is None else bias.to(each.device)}
        weights, _ = function(leaf, **options_here)
        (grad,) = torch.autograd.grad(weights.square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), leaf)[0].cpu().double())
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()  # of two formulas in float32, one in the other


def test_the_gradient_keeps_no_scores_of_experts_that_were_not_chosen(kernel) -> None:
    logits = torch.randn(64, 256, device="npu", requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        weights, _ = kernel.gating_top_k(logits, 8)
    assert weights.requires_grad
    assert sum(t.numel() for t in kept if t is not logits and t.data_ptr() != logits.data_ptr()) == 3 * 64 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_scores_are_compared_as_torch_rounds_them(kernel, dtype) -> None:
    logits = torch.randn(40, 64).to(dtype)
    npu_counts.reset()
    weights, experts = kernel.gating_top_k(logits.npu(), 4)
    assert OPERATOR not in npu_counts.read()
    assert weights.dtype is dtype
    scores = logits.sigmoid()
    chosen = scores.gather(-1, experts.cpu())
    assert torch.equal(chosen, scores.topk(4, -1).values)


def test_a_bias_in_another_dtype_is_added_in_float32(kernel) -> None:
    logits, bias = torch.randn(30, 16), torch.randn(16).bfloat16()
    _, experts = kernel.gating_top_k(logits.npu(), 4, bias.npu())
    assert torch.equal(experts.cpu().sort().values, exact(logits, 4, bias)[1])


def test_scores_that_vanish_have_finite_weights_and_gradients(kernel) -> None:
    logits = torch.full((2, 8), -200.0, device="npu", requires_grad=True)
    weights, _ = kernel.gating_top_k(logits, 2)
    weights.sum().backward()
    assert weights.tolist() == [[0.0, 0.0]] * 2
    assert logits.grad.tolist() == [[0.0] * 8] * 2


@pytest.mark.parametrize(
    ("logits", "options", "error", "message"),
    [
        (torch.zeros(2, 3, 4), {"k": 2}, ValueError, "logits must be [T, E]"),
        (torch.zeros(2, 4), {"k": 5}, ValueError, "got [2, 4], k = 5"),
        (torch.zeros(2, 4), {"k": 1, "groups": 3}, ValueError, "groups = 3"),
        (torch.zeros(2, 4), {"k": 1, "top_groups": 2}, ValueError, "top_groups = 2, groups = 1"),
        (torch.zeros(2, 3).long(), {"k": 1}, TypeError, "must be floating point, got torch.int64"),
        (
            torch.zeros(2, 3),
            {"k": 1, "scores": "tanh"},
            ValueError,
            "scores must be one of sigmoid, softmax, got 'tanh'",
        ),
        (
            torch.zeros(2, 4),
            {"k": 1, "groups": 2, "group_scores": "mean"},
            ValueError,
            "group_scores must be one of two best, best, got 'mean'",
        ),
    ],
)
def test_wrong_arguments_are_named(kernel, logits, options, error, message) -> None:
    with pytest.raises(error) as caught:
        kernel.gating_top_k(logits, **options)
    assert message in str(caught.value)
