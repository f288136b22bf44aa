"""Cross entropy of the logits of a head that is not trained: in pieces of tokens, with the gradient in the forward.

Each piece takes some tokens and all words. Its logits make the loss and, before they are freed, the gradient of the
hidden states for a loss that arrives with one: two products, and nothing as large as the logits is kept. Backward
multiplies it, row by row, by what arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import in_torch, pieces
from .derivatives import gradients
from .objective import Objective, statistics_dtype


class FrozenLinearCrossEntropy(torch.autograd.Function):
    """Computes the loss of each row ``[N]``, of which only the hidden states get a gradient.

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
        # the label's word is added by itself: it is most of the gradient, and would be rounded with the others
        slope = weight.index_select(0, inside).to(dtype)
        losses = []
        for rows in pieces.of_rows(hidden_states.shape[0], number):
            x = F.linear(hidden_states[rows], weight, bias)
            lse, picked, total = objective.statistics(x, inside[rows].unsqueeze(-1))
            losses.append(objective.loss(lse, picked, total, words))
            gradient = objective.gradient(torch.ones_like(lse), lse, picked, words)
            if objective == Objective(objective.ignore_index):
                x = torch.softmax(x, -1)  # the same in one launch, rounded as often
            else:
                gradient.overwrite(x)
            x.scatter_(1, inside[rows].unsqueeze(-1), 0)
            slope[rows].mul_(gradient.at_label).add_(torch.mm(x, weight)).mul_(gradient.sign)
            del x
        ctx.objective = objective
        ctx.save_for_backward(hidden_states, weight, bias, labels, slope)
        return torch.where(labels == objective.ignore_index, 0.0, torch.cat(losses))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, slope = ctx.saved_tensors
        objective, nothing = ctx.objective, (None,) * 5
        if torch.is_grad_enabled():
            found, *_ = gradients(
                lambda h: in_torch.linear_loss(h, weight, bias, labels, objective), (hidden_states,), (True,), grad
            )
            return found, *nothing
        counted = (labels != objective.ignore_index).unsqueeze(-1)
        return torch.where(counted, slope * grad.unsqueeze(-1), 0).to(hidden_states.dtype), *nothing
