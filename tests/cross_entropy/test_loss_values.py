"""cross_entropy and linear_cross_entropy against their formula in float64: values and all gradients, all options."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.cross_entropy.losses import (
    IGNORED,
    assert_no_further,
    compute_logits,
    compute_loss,
    draw,
    is_near,
    leaves,
    products,
    wide,
)


def back(loss: Tensor, grad: Tensor) -> None:
    loss.backward(grad.to(loss) if loss.dim() else None)


options = st.fixed_dictionaries(
    {},
    optional={
        "reduction": st.sampled_from(["none", "sum", "mean"]),
        "ignore_index": st.sampled_from([IGNORED, -1, 3]),
        "label_smoothing": st.sampled_from([0.1, 0.5, 1.0]),
        "z_loss": st.sampled_from([1e-4, 0.2, -0.3]),
        "logit_scale": st.sampled_from([0.25, 3.0, -1.5]),
        "softcap": st.sampled_from([1.0, 5.0, 30.0]),
        "num_items": st.sampled_from([7, 2.5, torch.tensor(7), torch.tensor([2.5])]),
    },
).filter(lambda drawn: "num_items" not in drawn or drawn.get("reduction", "mean") == "mean")


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 9), st.integers(4, 300), st.integers(1, 12), st.integers(0, 99), st.booleans(), st.booleans(),
    st.none() | st.integers(1, 9), options,
)  # fmt: skip
def test_values_and_gradients_with_all_options(
    kernel: ModuleType, name, n, words, hidden, seed, bias, is_frozen, pieces, chosen
) -> None:
    drawn = draw(n, words, hidden, seed, bias)
    labels = torch.where(drawn.labels == IGNORED, chosen.get("ignore_index", IGNORED), drawn.labels)
    scales = {key: chosen[key] for key in ("logit_scale", "softcap") if key in chosen}
    exact = leaves(drawn[:3], torch.float64, "cpu")
    formula = {key: value for key, value in chosen.items() if key not in scales}
    if "num_items" in formula:
        formula["num_items"] = float(formula["num_items"])
    expected = compute_loss(compute_logits(*exact, **scales), labels, **formula)
    back(expected, drawn.grad)

    ours, moved = leaves(drawn[:3], torch.float32, "npu"), {k: on_npu(v) for k, v in chosen.items()}
    for leaf in ours[1:] if is_frozen else ():
        if leaf is not None:
            leaf.requires_grad_(False)
    if name == "cross_entropy":
        found = kernel.cross_entropy(F.linear(*ours), labels.npu(), **moved)
    else:
        found = kernel.linear_cross_entropy(ours[0], ours[1], labels.npu(), ours[2], pieces=pieces, **moved)
    back(found, drawn.grad.npu())
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert is_near(found, expected)
    for leaf, exact_leaf in zip(ours, exact):
        assert leaf is None or not leaf.requires_grad or is_near(leaf.grad, exact_leaf.grad)


def on_npu(value: object) -> object:
    return value.npu() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("pieces", [None, 3])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_gradients_that_are_wanted_are_computed(kernel: ModuleType, npu_counters, wanted, pieces) -> None:
    """Two pieces of tokens for logits and hidden states, and one product for each parameter.

    Whoever names pieces of a trained head has its logits computed again, and all in pieces.
    """
    drawn = draw(6, 40, 8, bias=True)
    tensors = [tensor.npu().requires_grad_(i in wanted) for i, tensor in enumerate(drawn[:3])]
    before = products(npu_counters())
    kernel.linear_cross_entropy(tensors[0], tensors[1], drawn.labels.npu(), tensors[2], pieces=pieces).backward()
    token_products = (pieces or 2) * (1 + (0 in wanted)) + len({1, 2}.intersection(wanted))
    word_products = 3 * (1 + 1 + len(wanted))
    assert products(npu_counters()) - before == (token_products if pieces is None or wanted == (0,) else word_products)
    exact = leaves(drawn[:3], torch.float64, "cpu")
    compute_loss(compute_logits(*exact), drawn.labels).backward()
    for i, (tensor, expected) in enumerate(zip(tensors, exact)):
        assert (tensor.grad is None) == (i not in wanted)
        assert tensor.grad is None or is_near(tensor.grad, expected.grad)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_gradient_that_is_kept_serves_every_backward(kernel: ModuleType, npu_counters, softcap) -> None:
    drawn = draw(6, 40, 8, bias=True)
    exact, tensors = leaves(drawn[:3], torch.float64, "cpu"), leaves(drawn[:3], torch.float32, "npu")
    rows = kernel.linear_cross_entropy(
        tensors[0], tensors[1], drawn.labels.npu(), tensors[2], reduction="none", softcap=softcap
    )
    expected_rows = compute_loss(compute_logits(*exact, softcap=softcap), drawn.labels, reduction="none")
    for factor in (1, -3):
        before = products(npu_counters())
        found = torch.autograd.grad(rows, tensors, factor * drawn.grad.npu(), retain_graph=True)
        assert products(npu_counters()) - before == 2  # for weight and bias
        expected = torch.autograd.grad(expected_rows, exact, factor * drawn.grad.double(), retain_graph=True)
        assert all(is_near(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": -0.3, "logit_scale": -0.5, "softcap": 4.0}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_rows_that_differ_by_a_million(kernel: ModuleType, dtype, options) -> None:
    """To the roundings of the gradient of a logit, of what corrects it, of a row of hidden states, and of their sum.

    Logits are multiples of 1/4 below 32, which both dtypes have exactly.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randint(-3, 4, s, generator=generator).double() for s in ((96, 5), (60, 5), (60,)))
    labels = torch.randint(60, (96,), generator=generator)
    labels[::5] = IGNORED
    grad = torch.randn(96, generator=generator) * 10 ** (6 * torch.rand(96, generator=generator) - 3)
    logits = F.linear(hidden, weight / 4, bias / 4).requires_grad_()
    formula = dict(options)
    scaled = formula.pop("logit_scale", 1) * logits
    if softcap := formula.pop("softcap", None):
        scaled = softcap * torch.tanh(scaled / softcap)
    back(compute_loss(scaled, labels, reduction="none", **formula), grad)

    ours = leaves((hidden, weight / 4, bias / 4), dtype, "npu", wanted=(1, 2))
    back(kernel.linear_cross_entropy(ours[0], ours[1], labels.npu(), ours[2], reduction="none", **options), grad.npu())
    step, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    counted = grad.double().where(labels != IGNORED, 0).unsqueeze(1)
    for leaf, rows in ((ours[1], hidden), (ours[2], torch.ones(96, 1).double())):
        exact = logits.grad.t() @ rows
        sizes = logits.grad.abs().t() @ rows.abs()
        below = (counted * rows).abs().sum(0) + (logits.grad / counted).nan_to_num(0).abs().sum(0).unsqueeze(1)
        off = (leaf.grad.cpu().double().view_as(exact) - exact).abs()
        assert (off <= 3.01 * step * sizes + step * exact.abs() + 2 * least * below).all()


def test_hidden_states_times_what_arrives_may_be_more_than_float16_has(kernel: ModuleType) -> None:
    """As where GradScaler scales a loss of few rows: 1,000 times 2,048 is no float16, but the gradients are.

    To the roundings of the gradient of a logit, about e^-7, of what makes up for it, of hidden states and of the sum.
    """
    hidden, weight = torch.full((1, 2), 1000.0), torch.tensor([[7 / 2048] * 2, [0.0, 0.0]])  # both and logits are exact
    exact, ours = leaves((hidden, weight), torch.float64, "cpu"), leaves((hidden, weight), torch.float16, "npu")
    labels = torch.zeros(1, dtype=torch.long)
    (2048 * compute_loss(F.linear(*exact), labels, reduction="sum")).backward()
    (2048 * kernel.linear_cross_entropy(*ours, labels.npu(), reduction="sum")).backward()
    torch.testing.assert_close(ours[1].grad.cpu().double(), exact[1].grad, rtol=2**-9, atol=0)


def test_no_row_in_float16_gives_zero(kernel: ModuleType) -> None:
    hidden, weight = (torch.empty(n, 4, dtype=torch.float16, device="npu").requires_grad_() for n in (0, 9))
    kernel.linear_cross_entropy(hidden, weight, torch.empty(0, device="npu").long(), reduction="sum").backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("pieces", [None, 2, 8])
@pytest.mark.parametrize("closeness", [0.0, 2.0, 6.0])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_bfloat16_is_no_further_from_float64_than_the_path_of_transformers(
    kernel: ModuleType, is_frozen, closeness, pieces, softcap
) -> None:
    """ForCausalLMLoss of transformers 5.22.2, loss/loss_utils.py, for an untrained head and for trained ones."""
    drawn = draw(128, 1000, 64, seed=1)
    weight = drawn.weight / 8
    hidden = drawn.hidden_states + closeness * F.normalize(weight[drawn.labels], dim=-1)

    def transformers(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(wide(compute_logits(h, w, softcap=softcap)), labels, reduction="none")

    def ours(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return kernel.linear_cross_entropy(h, w, labels, reduction="none", softcap=softcap, pieces=pieces)

    given = [hidden.bfloat16(), weight.bfloat16(), drawn.labels]
    assert_no_further(ours, transformers, given, torch.bfloat16, (0,) if is_frozen else (0, 1))
