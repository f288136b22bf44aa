"""linear_generalized_jsd against its formula in float64, and what it promises beside its values."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cross_entropy.losses import (
    IGNORED,
    assert_no_further,
    bends,
    compute_logits,
    draw,
    is_near,
    leaves,
    products,
    wide,
)

BETAS = [0, 0.1, 0.5, 0.9, 1]
reductions = st.sampled_from(["none", "sum", "batchmean"]).map(lambda name: {"reduction": name})
reductions |= st.sampled_from([7, torch.tensor(2.5)]).map(lambda number: {"num_items": number})


def drawn(tokens: int, words: int, sizes: tuple[int, int] = (8, 5), seed: int = 0, bias: bool = True) -> list[Any]:
    """Return hidden states, weight and bias of a student, the same of a teacher, and labels."""
    student, teacher = (draw(tokens, words, size, seed + i, bias) for i, size in enumerate(sizes))
    return [*student[:3], *teacher[:3], torch.where(student.labels == IGNORED, IGNORED, words)]


def expected_jsd(student: Tensor, teacher: Tensor, labels: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row of logits, in the words of arXiv:2306.13649."""
    s, t = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    parts = torch.tensor([1.0 - beta, beta], device=s.device).log()
    mixture = torch.logaddexp(s + parts[0], t + parts[1])
    teacher_kl, student_kl = ((x.exp() * (x - (mixture if 0 < beta < 1 else y))).sum(-1) for x, y in ((t, s), (s, t)))
    rows = teacher_kl if beta == 0 else student_kl if beta == 1 else beta * teacher_kl + (1 - beta) * student_kl
    return torch.where(labels == IGNORED, 0, rows)


def kernel_jsd(kernel: ModuleType, own: Sequence[Any], **options: Any) -> Tensor:
    return kernel.linear_generalized_jsd(own[0], own[1], own[3], own[4], own[6], own[2], own[5], **options)


@pytest.mark.parametrize("beta", BETAS)
@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 9), st.integers(2, 300), st.integers(0, 99), st.booleans(), st.booleans(),
    st.none() | st.integers(1, 9), bends, bends, reductions,
)  # fmt: skip
def test_values_and_gradients(
    kernel: ModuleType, beta, n, words, seed, bias, is_frozen, pieces, student, teacher, reduction
) -> None:
    tensors, wanted = drawn(n, words, seed=seed, bias=bias), (0,) if is_frozen else (0, 1, 2)
    exact, ours = leaves(tensors, torch.float64, "cpu", wanted), leaves(tensors, torch.float32, "npu", wanted)
    rows = expected_jsd(compute_logits(*exact[:3], **student), compute_logits(*exact[3:6], **teacher), exact[6], beta)
    count = (exact[6] != IGNORED).sum().clamp(min=1)
    how = reduction.get("reduction", "batchmean")
    expected = rows if how == "none" else rows.sum() / (reduction.get("num_items", count) if how == "batchmean" else 1)
    found = kernel_jsd(
        kernel, ours, beta=beta, pieces=pieces, **student, **reduction,
        teacher_logit_scale=teacher.get("logit_scale", 1.0), teacher_softcap=teacher.get("softcap"),
    )  # fmt: skip
    assert is_near(found, expected)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected.backward(grad)
    found.backward(grad.npu().float())
    assert all(ours[i] is None or is_near(ours[i].grad, exact[i].grad) for i in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", BETAS)
def test_sixteen_bits_are_no_further_from_float64_than_all_logits_in_torch(kernel: ModuleType, beta, dtype) -> None:
    tensors = drawn(128, 1000, (64, 32), bias=False)
    rounded = [t.to(dtype) / (8 if len(t) == 1000 else 1) if t is not None and t.dim() == 2 else t for t in tensors]

    def ours(*own: Any) -> Tensor:
        return kernel_jsd(kernel, own, beta=beta, logit_scale=1 / 0.7, reduction="none")

    def formula(*own: Any) -> Tensor:
        return expected_jsd(*(wide(compute_logits(*own[i : i + 2])) / 0.7 for i in (0, 3)), own[6], beta)

    assert_no_further(ours, formula, rounded, dtype)


@pytest.mark.parametrize("beta", BETAS)
def test_logits_of_a_thousand_stay_finite(kernel: ModuleType, beta) -> None:
    """Both are sure of one word in the first row, and of different words in the second."""
    own = [(torch.eye(4) * 2000 - 1000)[:2].npu().requires_grad_(), torch.eye(4).npu().requires_grad_(), None]
    teacher = [own[0].detach()[0].repeat(2, 1), own[1].detach(), None]
    rows = kernel_jsd(kernel, [*own, *teacher, None], beta=beta, reduction="none")
    rows.sum().backward()
    apart = 2000 if beta in (0, 1) else -sum(part * math.log(part) for part in (beta, 1 - beta))
    assert rows.tolist() == pytest.approx([0, apart], abs=2**-20)
    assert all(tensor.grad.isfinite().all() for tensor in own[:2])


def test_a_scaled_loss_may_bring_more_than_float16_has(kernel: ModuleType) -> None:
    """Hidden states of 1,000 times 2,048 have no float16. A power of two changes nothing else: exactly."""
    found = []
    for scale in (1, 2048):
        student = [torch.full((4, 2), 1000.0), torch.tensor([[7 / 2048] * 2, [0.0, 0.0], [0.002, 0.0]]), torch.zeros(3)]
        own = leaves([*student, *(tensor * 1.01 for tensor in student), None], torch.float16, "npu")
        (scale * kernel_jsd(kernel, own, beta=0, reduction="sum")).backward()
        found.append([own[i].grad / scale for i in (1, 2)])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in found[1])
    assert all(torch.equal(*both) for both in zip(*found))


# logits of two heads, each gradient but that of the bias, and what is not kept of both heads' logits once more
@pytest.mark.parametrize(("pieces", "again"), [(None, 0), (3, 2)])
@pytest.mark.parametrize("wanted", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_only_gradients_that_are_wanted_are_computed(kernel: ModuleType, npu_counters, wanted, pieces, again) -> None:
    """A head that is not trained costs three products, and its teacher gets no gradient."""
    own = leaves(drawn(6, 40), torch.float32, "npu", (*wanted, 3, 4, 5) if wanted else (0, 1, 2))
    before = products(npu_counters())
    with torch.set_grad_enabled(bool(wanted)):
        loss = kernel_jsd(kernel, own, pieces=pieces)
    if wanted:
        loss.backward()
    is_trained = 1 in wanted or 2 in wanted
    expected = 2 + (0 in wanted) + (1 in wanted) + (2 in wanted) + again * is_trained
    assert products(npu_counters()) - before == (pieces or 2) * expected
    assert [i for i in range(6) if own[i].grad is not None] == [*wanted]


def test_a_gradient_can_be_differentiated_again_and_transformed(kernel: ModuleType) -> None:
    """To 2^-16 of float64; torch.func gives the same first derivatives."""
    tensors, found = drawn(6, 40), []
    for is_ours, dtype, device in ((False, torch.float64, "cpu"), (True, torch.float32, "npu")):
        own = leaves(tensors, dtype, device)
        if is_ours:
            loss = kernel_jsd(kernel, own, beta=0.1, reduction="sum")
        else:
            loss = expected_jsd(compute_logits(*own[:3]), compute_logits(*own[3:6]), own[6], 0.1).sum()
        first = torch.autograd.grad(loss, own[:3], create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        found.append([*first, *(leaf.grad for leaf in own[:3])])
    assert all(is_near(ours, expected) for expected, ours in zip(*found))
    plain = [tensor.detach() for tensor in own]
    weight_only = torch.func.grad(lambda w: kernel_jsd(kernel, [plain[0], w, *plain[2:]], beta=0.1, reduction="sum"))
    assert is_near(weight_only(plain[1]), found[0][1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"teacher_weight": torch.ones(41, 5)}, ValueError, "40 words, teacher_weight 41: both heads need the same"),
        ({"teacher_weight": torch.ones(40, 8)}, ValueError, r"teacher_weight must be \[V, 5\], got \[40, 8\]"),
        ({"teacher_bias": torch.ones(1)}, ValueError, r"teacher_bias must be \[40\], got \[1\]"),
        ({"teacher_hidden_states": torch.ones(5, 5)}, ValueError, r"rows of teacher_hidden_states must be \[6\]"),
        ({"labels": torch.ones(2, 3)}, ValueError, r"labels must be \[6\]"),
        ({"teacher_hidden_states": torch.ones(6, 5).long()}, TypeError, "floating point"),
        ({"beta": 1.5}, ValueError, "beta must be between 0 and 1, got 1.5"),
        ({"reduction": "mean"}, ValueError, "none, batchmean, sum"),
        ({"reduction": "sum", "num_items": 3}, ValueError, "num_items"),
        ({"teacher_softcap": 0.0}, ValueError, "teacher: softcap must be positive"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale must not be zero"),
        ({"pieces": 0}, ValueError, "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(kernel: ModuleType, change, error, message) -> None:
    names = ("hidden_states", "weight", "bias", "teacher_hidden_states", "teacher_weight", "teacher_bias", "labels")
    with pytest.raises(error, match=message):
        kernel.linear_generalized_jsd(**{**dict(zip(names, drawn(6, 40))), **change})
