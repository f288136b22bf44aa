"""Cross entropy of logits, in pieces of rows: nothing in float32 is as large as the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from . import in_torch, one_word, pieces
from ._common.derivatives import by_formula, gradients
from .objective import Objective


class CrossEntropy(torch.autograd.Function):
    """Computes the loss of each row ``[N]``: ``apply(logits, labels, objective)``."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
        words = logits.shape[1]
        inside = labels.clamp(0, words - 1).unsqueeze(-1)
        lse, picked, total = objective.statistics(logits, inside)
        ctx.objective = objective
        ctx.save_for_backward(logits, labels, lse, picked)
        return torch.where(labels == objective.ignore_index, 0.0, objective.loss(lse, picked, total, words))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        logits, labels, lse, picked = ctx.saved_tensors
        if by_formula(grad):
            found = gradients(
                lambda x: in_torch.loss(x, labels, ctx.objective), (logits,), ctx.needs_input_grad[:1], grad
            )
            return *found, None, None
        tokens, words = logits.shape
        counted = torch.where(labels == ctx.objective.ignore_index, 0.0, grad)
        gradient = ctx.objective.gradient(counted, lse, picked, words)
        inside = labels.clamp(0, words - 1).unsqueeze(-1)
        d_logits, sign = logits.new_empty(logits.shape), gradient.sign.to(logits.dtype)
        for rows in pieces.of_rows(tokens, pieces.for_statistics(tokens, words)):
            d_rows = gradient.rows(rows).of_words(logits[rows])
            if d_rows.dtype is d_logits.dtype:
                torch.mul(d_rows, sign[rows], out=d_logits[rows])
            else:  # the other way round the product would be written in 32 bits, before its cast
                d_logits[rows].copy_(d_rows).mul_(sign[rows])
        one_word.write(d_logits, one_word.places(inside), (gradient.at_label * gradient.sign).to(logits.dtype))
        return d_logits, None, None
