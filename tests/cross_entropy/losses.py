"""What the losses of CrossEntropy have to give: their formula, written out, in the dtype of the tensors."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.measuring import distance

IGNORED = -100
# what may happen to logits
bends = st.fixed_dictionaries(
    {}, optional={"logit_scale": st.sampled_from([0.25, 3.0, -1.5]), "softcap": st.sampled_from([1.0, 5.0, 30.0])}
)


class Drawn(NamedTuple):
    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    grad: Tensor


def draw(tokens: int, words: int, hidden: int, seed: int = 0, bias: bool = False, ignored: float = 0.3) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(words, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return Drawn(
        torch.randn(tokens, hidden, generator=generator),
        torch.randn(words, hidden, generator=generator),
        torch.randn(words, generator=generator) if bias else None,
        labels,
        torch.randn(tokens, generator=generator),
    )


def leaves(tensors: Sequence[Any], dtype: torch.dtype, device: str, wanted: Collection[int] = (0, 1, 2)) -> list[Any]:
    """Move tensors, floating ones to a dtype too; those with these numbers take a gradient. None stays None."""
    moved = [None if t is None else t.to(device, dtype if t.is_floating_point() else t.dtype) for t in tensors]
    return [t.requires_grad_() if t is not None and i in wanted else t for i, t in enumerate(moved)]


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Tell whether a result is right to 2^-16 of the largest value.

    Logits up to 30 in size have steps of 2^-19 in float32; sums over 12 products, 300 words and 9 tokens add to them.
    """
    found, expected = found.detach().cpu().double(), expected.detach()
    if expected.isnan().any():  # the mean over no row
        return torch.equal(found.isnan(), expected.isnan())
    return not found.numel() or bool((found - expected).abs().max() <= 2**-16 * (1 + expected.abs().max()))


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32, in which torch computes a loss of those of 16 bits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def assert_no_further(
    ours: Callable, theirs: Callable, given: Sequence[Any], dtype: torch.dtype, wanted: Sequence[int] = (0, 1)
) -> None:
    """Compare results and gradients with float64, beside those of a formula in torch, of the same rounded tensors.

    Logits and gradients are rounded as often, so that sums of float32 in another order are all that can differ: 1%.
    What arrives is a power of two, and rounds nothing.
    """

    def results(function: Callable, dtype: torch.dtype, device: str) -> list[Tensor]:
        own = leaves(given, dtype, device, wanted)
        outputs = distance.tensors(function(*own))
        torch.autograd.backward(outputs, [torch.full_like(y, 1 / 64) for y in outputs])
        return [t.detach().cpu().double() for t in (*outputs, *(own[i].grad for i in wanted))]

    exact = results(theirs, torch.float64, "cpu")
    for found, torchs, truth in zip(results(ours, dtype, "npu"), results(theirs, dtype, "npu"), exact):
        assert (found - truth).norm() <= 1.01 * (torchs - truth).norm()


def products(calls: Mapping[str, int]) -> int:
    return sum(count for name, count in calls.items() if name.startswith(("mm", "addmm", "linear", "matmul")))


def compute_logits(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the logits of a head after scale and softcap."""
    logits = F.linear(hidden_states, weight, bias) * logit_scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def compute_loss(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: float | None = None,
) -> Tensor:
    """Return the loss of logits ``[N, V]``, row by row, from the probabilities of all words."""
    counted = labels != ignore_index
    log_probs = logits - logits.exp().sum(-1, keepdim=True).log()
    wanted = F.one_hot(labels.masked_fill(~counted, 0), logits.shape[-1]).to(logits)
    wanted = (1 - label_smoothing) * wanted + label_smoothing / logits.shape[-1]
    rows = -(wanted * log_probs).sum(-1) + z_loss * logits.exp().sum(-1).log().square()
    rows = rows.masked_fill(~counted, 0)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / (counted.sum() if num_items is None else num_items)
