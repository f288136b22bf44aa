"""linear_log_probs_and_entropy against its formula in float64: both values, and the gradients of both together."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cross_entropy.losses import IGNORED, assert_no_further, bends, compute_logits, draw, is_near, leaves, wide


def both_results(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return log probabilities and entropies, written out as a distribution of torch has them."""
    words = torch.distributions.Categorical(logits=logits, validate_args=False)
    counted = labels != IGNORED
    return tuple(torch.where(counted, x, 0) for x in (words.log_prob(labels.clamp(min=0)), words.entropy()))


@pytest.mark.parametrize("wanted", ["both", "log_probs", "entropy"])
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 9), st.integers(4, 300), st.integers(1, 12), st.integers(0, 99), st.booleans(),
    st.none() | st.integers(1, 9), bends,
)  # fmt: skip
def test_values_and_gradients(kernel: ModuleType, wanted, n, words, hidden, seed, bias, pieces, chosen) -> None:
    *tensors, labels, grad = draw(n, words, hidden, seed, bias)
    exact, ours = leaves(tensors, torch.float64, "cpu"), leaves(tensors, torch.float32, "npu")
    expected = both_results(compute_logits(*exact, **chosen), labels)
    found = kernel.linear_log_probs_and_entropy(ours[0], ours[1], labels.npu(), ours[2], pieces=pieces, **chosen)
    assert all(is_near(a, b) for a, b in zip(found, expected))
    which, grads = {"both": [0, 1], "log_probs": [0], "entropy": [1]}[wanted], (grad, grad.cos())
    torch.autograd.backward([expected[i] for i in which], [grads[i].double() for i in which])
    torch.autograd.backward([found[i] for i in which], [grads[i].npu() for i in which])
    for leaf, exact_leaf in zip(ours, exact):
        assert leaf is None or is_near(leaf.grad, exact_leaf.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1 / 0.7])
def test_sixteen_bits_are_no_further_from_float64_than_all_logits_in_torch(kernel: ModuleType, dtype, scale) -> None:
    drawn = draw(128, 1000, 64, seed=1)

    def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return kernel.linear_log_probs_and_entropy(hidden, weight, labels, logit_scale=scale)

    def formula(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return both_results(wide(compute_logits(hidden, weight)) * scale, labels)

    assert_no_further(ours, formula, [drawn[0].to(dtype), (drawn[1] / 8).to(dtype), drawn.labels], dtype)


def test_leading_dimensions_and_log_probs_are_those_of_linear_log_probs(kernel: ModuleType) -> None:
    hidden, weight, bias, labels, _ = (tensor.npu() for tensor in draw(6, 50, 8, bias=True))
    hidden, labels = hidden.view(2, 3, 8), labels.view(2, 3).int()
    log_probs, entropy = kernel.linear_log_probs_and_entropy(hidden, weight, labels, bias)
    assert torch.equal(log_probs, kernel.linear_log_probs(hidden, weight, labels, bias))
    assert entropy.shape == labels.shape


def test_an_entropy_that_is_only_looked_at_costs_no_gradient(kernel: ModuleType, npu_counters) -> None:
    """Both take the vocabulary in two pieces, whose logits they compute again."""
    drawn, counts = draw(6, 40, 8), []
    for has_entropy in (False, True):
        own = leaves(drawn[:2], torch.float32, "npu")
        take = kernel.linear_log_probs_and_entropy if has_entropy else kernel.linear_log_probs
        found = take(*own, drawn.labels.npu(), pieces=2)
        loss = (found[0] if has_entropy else found).sum()
        before = npu_counters().copy()
        loss.backward()
        counted = {name: count - before.get(name, 0) for name, count in npu_counters().items()}
        counts.append({name: count for name, count in counted.items() if count})
    assert counts[0] == counts[1]


def test_labels_that_do_not_fit_are_refused(kernel: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"labels must be \[2, 3\]"):
        kernel.linear_log_probs_and_entropy(torch.ones(2, 3, 8), torch.ones(9, 8), torch.ones(2, 4).long())
