"""Cross entropy of the logits of a head in chunks of tokens, with their gradient in the forward.

Each chunk takes some tokens and all words. Its logits make the loss and, before they are freed, their gradient for a
loss that arrives with one, and of it that of the hidden states: backward multiplies that, row by row, by what arrives.
Where the head is not trained nothing else is kept. Where it is the gradient of the logits is kept in the dtype of the
head: what arrives multiplies its rows, or in their place those of the hidden states, which are shorter. The weight's
gradient is one product of both, rounded once. vocab_chunks.py has trained heads whose logits are too many for that.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .._common.derivatives import gradients
from ..ops import chunking, reference
from ..ops.float16_range import scale_into_range
from ..ops.head_logits import logits_and_statistics
from ..ops.label_scatter import row_and_word, write_one_per_row
from ..ops.objective import Objective, statistics_dtype


class LinearCrossEntropyByTokens(torch.autograd.Function):
    """Computes the loss of each row ``[N]``.

    ``apply(hidden_states, weight, bias, labels, objective, chunks)`` takes ``[N, H]``, ``[V, H]``, ``[V]`` or None,
    ``[N]``, the options, and the number of chunks.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        objective: Objective,
        chunks: int,
    ) -> Tensor:
        words, dtype = weight.shape[0], statistics_dtype(hidden_states.dtype)
        inside = labels.clamp(0, words - 1)
        needs_hidden, *trains = ctx.needs_input_grad[:3]
        # the label's word is added by itself: it is most of the gradient, and would be rounded with the others
        d_hidden = weight.index_select(0, inside).to(dtype) if needs_hidden else None
        d_logits = hidden_states.new_empty(labels.shape[0], words) if any(trains) else None
        row_results = []
        for rows in chunking.row_slices(hidden_states.shape[0], chunks):
            label = inside[rows].unsqueeze(-1)
            x, (lse, label_logits, logit_sums) = logits_and_statistics(
                hidden_states[rows], weight, bias, label, objective
            )
            gradient = objective.gradient(torch.ones_like(lse), lse, label_logits, words)
            loss = objective.loss(lse, label_logits, logit_sums, words)
            row_results.append((loss, gradient.at_label, gradient.sign))
            off_label = x if d_logits is None else d_logits[rows]
            if objective != Objective(objective.ignore_index):
                gradient.write(x, off_label)
            elif d_logits is None:
                off_label = torch.softmax(x, -1)  # the same in one launch, rounded as often
            else:
                torch.softmax(x, -1, out=off_label)
            del x
            if d_hidden is not None:
                write_one_per_row(off_label, row_and_word(label), off_label.new_zeros(label.shape))
                d_hidden[rows].mul_(gradient.at_label).add_(torch.mm(off_label, weight)).mul_(gradient.sign)
            del off_label
        loss, at_label, sign = (torch.cat(each) for each in zip(*row_results))
        row_factor = None
        if d_logits is not None:
            rounded = at_label.to(d_logits.dtype)
            write_one_per_row(d_logits, row_and_word(inside.unsqueeze(-1)), rounded)
            row_factor = sign * _rounding_correction(at_label, rounded)
        ctx.objective = objective
        ctx.save_for_backward(hidden_states, weight, bias, labels, d_hidden, d_logits, row_factor)
        return torch.where(labels == objective.ignore_index, 0.0, loss)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, saved_d_hidden, d_logits, row_factor = ctx.saved_tensors
        objective, needs, nothing = ctx.objective, ctx.needs_input_grad[:3], (None,) * 3
        if torch.is_grad_enabled():
            formula = partial(reference.linear_loss, labels=labels, objective=objective)
            return *gradients(formula, (hidden_states, weight, bias), needs, grad), *nothing
        is_counted = (labels != objective.ignore_index).unsqueeze(-1)
        d_hidden = d_weight = d_bias = None
        if saved_d_hidden is not None:
            d_hidden = torch.where(is_counted, saved_d_hidden * grad.unsqueeze(-1), 0).to(hidden_states.dtype)
        if d_logits is not None:
            factor = torch.where(is_counted, grad.unsqueeze(-1) * row_factor, 0)
            d_weight = _sum_over_tokens(d_logits, hidden_states * factor) if needs[1] else None
            d_bias = _sum_over_tokens(d_logits, factor).squeeze(1) if needs[2] else None
        return d_hidden, d_weight, d_bias, *nothing


def _rounding_correction(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return what rounded numbers have to be multiplied with to be exact.

    Most of a row's gradient is at its label: what multiplies the row makes up for what is lost there.
    """
    eps = torch.finfo(rounded.dtype).eps
    return (exact / rounded).nan_to_num(1).clamp(1 - eps, 1 + eps)  # 0 / 0, and numbers below the smallest normal one


def _sum_over_tokens(d_logits: Tensor, rows: Tensor) -> Tensor:
    """Return ``d_logitsᵀ @ rows``, of ``[N, V]`` and rows ``[N, K]`` in any dtype, in that of ``d_logits``."""
    rows, scale = scale_into_range(rows, d_logits.dtype)
    total = torch.mm(d_logits.t(), rows)
    return total if scale is None else total.mul_(scale)
