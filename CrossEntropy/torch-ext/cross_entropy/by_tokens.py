"""Cross entropy of the logits of a head in pieces of tokens, with their gradient in the forward.

Each piece takes some tokens and all words. Its logits make the loss and, before they are freed, their gradient for a
loss that arrives with one, and of it that of the hidden states: backward multiplies that, row by row, by what arrives.
Where the head is not trained nothing else is kept. Where it is the gradient of the logits is kept in the dtype of the
head, and what arrives is multiplied into it, so that the weight's gradient is one product, rounded once. linear.py has
trained heads whose logits are too many for that.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from . import in_torch, pieces
from .derivatives import gradients
from .linear import cut, gradients_of_head
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
            x, label = F.linear(hidden_states[rows], weight, bias), inside[rows].unsqueeze(-1)
            lse, picked, total = objective.statistics(x, label)
            gradient = objective.gradient(torch.ones_like(lse), lse, picked, words)
            found.append((objective.loss(lse, picked, total, words), lse, picked, gradient.at_label, gradient.sign))
            others = x if kept is None else kept[rows]
            if objective != Objective(objective.ignore_index):
                gradient.write(x, others)
            elif kept is None:
                others = torch.softmax(x, -1)  # the same in one launch, rounded as often
            else:
                torch.softmax(x, -1, out=others)
            del x
            if slope is not None:
                others.scatter_(1, label, 0)
                slope[rows].mul_(gradient.at_label).add_(torch.mm(others, weight)).mul_(gradient.sign)
            del others
        loss, *known = (torch.cat(each) for each in zip(*found))
        ctx.objective = objective
        ctx.is_kept = kept is not None  # until a backward has multiplied it
        ctx.save_for_backward(hidden_states, weight, bias, labels, slope, kept, *known)
        return torch.where(labels == objective.ignore_index, 0.0, loss)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, slope, kept, lse, picked, at_label, sign = ctx.saved_tensors
        objective, needs, nothing = ctx.objective, ctx.needs_input_grad[:3], (None,) * 3
        if torch.is_grad_enabled():
            found = gradients(
                lambda h, w, b: in_torch.linear_loss(h, w, b, labels, objective),
                (hidden_states, weight, bias),
                needs,
                grad,
            )
            return *found, *nothing
        counted = torch.where(labels == objective.ignore_index, 0.0, grad)
        d_hidden = d_weight = d_bias = None
        if slope is not None:
            is_counted = (labels != objective.ignore_index).unsqueeze(-1)
            d_hidden = torch.where(is_counted, slope * grad.unsqueeze(-1), 0).to(hidden_states.dtype)
        if ctx.is_kept:
            ctx.is_kept = False
            factor, d_logits = counted.unsqueeze(-1) * sign, kept.data  # autograd need not know that it changes
            inside = labels.clamp(0, weight.shape[0] - 1).unsqueeze(-1)
            d_logits.mul_(factor.to(d_logits.dtype)).scatter_(1, inside, (at_label * factor).to(d_logits.dtype))
            d_weight = torch.mm(d_logits.t(), hidden_states) if needs[1] else None
            d_bias = torch.mm(torch.ones_like(d_logits[:, :1]).t(), d_logits).squeeze(0) if needs[2] else None
        elif kept is not None:
            parts = cut(weight, bias, labels, None, pieces.how_many(*kept.shape))
            gradient = objective.gradient(counted, lse, picked, weight.shape[0])
            _, d_weight, d_bias = gradients_of_head(
                hidden_states, zip_longest(parts, []), gradient, weight, bias, (False, *needs[1:])
            )
        return d_hidden, d_weight, d_bias, *nothing
