"""Cross entropy of logits, in chunks of rows: nothing in float32 is as large as the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.derivatives import by_formula, gradients
from ..ops import chunking, reference
from ..ops.label_scatter import row_and_word, write_one_per_row
from ..ops.objective import Objective


class CrossEntropy(torch.autograd.Function):
    """Computes the loss of each row ``[N]``: ``apply(logits, labels, objective)``."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
        words = logits.shape[1]
        inside = labels.clamp(0, words - 1).unsqueeze(-1)
        lse, label_logits, logit_sums = objective.statistics(logits, inside)
        ctx.objective = objective
        ctx.save_for_backward(logits, labels, lse, label_logits)
        loss = objective.loss(lse, label_logits, logit_sums, words)
        return torch.where(labels == objective.ignore_index, 0.0, loss)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        logits, labels, lse, label_logits = ctx.saved_tensors
        if by_formula(grad):
            return (
                *gradients(lambda x: reference.logits_loss(x, labels, ctx.objective), (logits,), (True,), grad),
                None,
                None,
            )
        tokens, words = logits.shape
        counted = torch.where(labels == ctx.objective.ignore_index, 0.0, grad)
        gradient = ctx.objective.gradient(counted, lse, label_logits, words)
        inside = labels.clamp(0, words - 1).unsqueeze(-1)
        d_logits, sign = logits.new_empty(logits.shape), gradient.sign.to(logits.dtype)
        for rows in chunking.row_slices(tokens, chunking.float32_chunk_count(tokens, words)):
            d_rows = gradient.rows(rows).off_label(logits[rows])
            if d_rows.dtype is d_logits.dtype:
                torch.mul(d_rows, sign[rows], out=d_logits[rows])
            else:  # the other way round the product would be written in 32 bits, before its cast
                d_logits[rows].copy_(d_rows).mul_(sign[rows])
        write_one_per_row(d_logits, row_and_word(inside), (gradient.at_label * gradient.sign).to(logits.dtype))
        return d_logits, None, None
