"""What the losses of CrossEntropy have to give: their formula, written out, in the dtype of the tensors."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


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


def products(calls: Mapping[str, int]) -> int:
    return sum(count for name, count in calls.items() if name.startswith(("mm", "addmm", "linear", "matmul")))


def logits_of(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the logits of a head after scale and softcap."""
    logits = F.linear(hidden_states, weight, bias) * logit_scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def loss_of(
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
