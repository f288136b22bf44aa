"""Cross entropy of the logits of a head in pieces of tokens, with their gradient in the forward.

Each piece takes some tokens and all words. Its logits make the loss and, before they are freed, their gradient for a
loss that arrives with one, and of it that of the hidden states: backward multiplies that, row by row, by what arrives.
Where the head is not trained nothing else is kept. Where it is the gradient of the logits is kept in the dtype of the
head: what arrives multiplies its rows, or in their place those of the hidden states, which are shorter. The weight's
gradient is one product of both, rounded once. linear.py has trained heads whose logits are too many for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import in_torch, one_word, pieces
from ._common.derivatives import gradients
from .float16 import brought_within
from .head import logits_and_statistics
from .objective import Objective, statistics_dtype


class LinearCrossEntropyByTokens(torch.autograd.Function):
    """Computes the loss of each row ``[N]``.

    ``apply(hidden_states, weight, bias, labels, objective, pieces)`` takes ``[N, H]``, ``[V, H]``, ``[V]`` or None,
    ``[N]``, the options, and the number of pieces.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        objective: Objective,
        number: int,
    ) -> Tensor:
        words, dtype = weight.shape[0], statistics_dtype(hidden_states.dtype)
        inside = labels.clamp(0, words - 1)
        needs_hidden, *trains = ctx.needs_input_grad[:3]
        # the label's word is added by itself: it is most of the gradient, and would be rounded with the others
        slope = weight.index_select(0, inside).to(dtype) if needs_hidden else None
        kept = hidden_states.new_empty(labels.shape[0], words) if any(trains) else None
        found = []
        for rows in pieces.of_rows(hidden_states.shape[0], number):
            label = inside[rows].unsqueeze(-1)
            x, (lse, picked, total) = logits_and_statistics(hidden_states[rows], weight, bias, label, objective)
            gradient = objective.gradient(torch.ones_like(lse), lse, picked, words)
            found.append((objective.loss(lse, picked, total, words), gradient.at_label, gradient.sign))
            others = x if kept is None else kept[rows]
            if objective != Objective(objective.ignore_index):
                gradient.write(x, others)
            elif kept is None:
                others = torch.softmax(x, -1)  # the same in one launch, rounded as often
            else:
                torch.softmax(x, -1, out=others)
            del x
            if slope is not None:
                one_word.write(others, one_word.places(label), others.new_zeros(label.shape))
                slope[rows].mul_(gradient.at_label).add_(torch.mm(others, weight)).mul_(gradient.sign)
            del others
        loss, at_label, sign = (torch.cat(each) for each in zip(*found))
        share = None
        if kept is not None:
            rounded = at_label.to(kept.dtype)
            one_word.write(kept, one_word.places(inside.unsqueeze(-1)), rounded)
            share = sign * _correction(at_label, rounded)
        ctx.objective = objective
        ctx.save_for_backward(hidden_states, weight, bias, labels, slope, kept, share)
        return torch.where(labels == objective.ignore_index, 0.0, loss)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, slope, kept, share = ctx.saved_tensors
        objective, needs, nothing = ctx.objective, ctx.needs_input_grad[:3], (None,) * 3
        if torch.is_grad_enabled():
            found = gradients(
                lambda h, w, b: in_torch.linear_loss(h, w, b, labels, objective),
                (hidden_states, weight, bias),
                needs,
                grad,
            )
            return *found, *nothing
        is_counted = (labels != objective.ignore_index).unsqueeze(-1)
        d_hidden = d_weight = d_bias = None
        if slope is not None:
            d_hidden = torch.where(is_counted, slope * grad.unsqueeze(-1), 0).to(hidden_states.dtype)
        if kept is not None:
            factor = torch.where(is_counted, grad.unsqueeze(-1) * share, 0)
            d_weight = _summed_over_tokens(kept, hidden_states * factor) if needs[1] else None
            d_bias = _summed_over_tokens(kept, factor).squeeze(1) if needs[2] else None
        return d_hidden, d_weight, d_bias, *nothing


def _correction(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return what numbers have to be multiplied with after they were rounded.

    Most of a row's gradient is at its label: what multiplies the row makes up for what is lost there.
    """
    eps = torch.finfo(rounded.dtype).eps
    return (exact / rounded).nan_to_num(1).clamp(1 - eps, 1 + eps)  # 0 / 0, and numbers below the smallest normal one


def _summed_over_tokens(d_logits: Tensor, rows: Tensor) -> Tensor:
    """Return ``d_logitsᵀ @ rows``, of ``[N, V]`` and rows ``[N, K]`` in any dtype, in that of ``d_logits``."""
    rows, beyond = brought_within(rows, d_logits.dtype)
    found = torch.mm(d_logits.t(), rows)
    return found if beyond is None else found.mul_(beyond)
