"""The generalised Jensen-Shannon divergence of a student's head and a teacher's, as a node of autograd."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.derivatives import by_formula, gradients
from ..ops import chunking, reference
from ..ops.divergence import Divergence, DivergenceStatistics
from ..ops.float16_range import scale_into_range


class LinearGeneralizedJSD(torch.autograd.Function):
    """Computes the divergence of two heads' distributions in each row ``[N]``, in chunks of tokens.

    The logits of each chunk make its rows and, before they are freed, the gradient of the student's: of it that of the
    hidden states. Where the weight is trained it is kept for the backward in the dtype of the head, up to ``budget``
    bytes; of rows behind these the logits are computed again there. As in vocab_chunks.py, each row of the weight's
    gradient is one product, rounded once.

    ``apply(hidden_states, weight, bias, teacher_hidden_states, teacher_weight, teacher_bias, divergence, scale,
    token_chunks, vocab_chunks, budget)`` takes ``[N, H]``, ``[V, H]``, ``[V]`` or None, the same of the teacher, the
    options, what gradients are multiplied with before they are rounded, of no dimension, into how many chunks tokens
    are cut and, in the backward, words, and how many bytes of gradients are kept.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden_states: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        divergence: Divergence,
        scale: Tensor,
        token_chunks: int,
        vocab_chunks: int,
        budget: int,
    ) -> Tensor:
        needs_hidden, *others = ctx.needs_input_grad[:3]
        saved_d_hidden = torch.empty_like(hidden_states) if needs_hidden else None
        chunk_statistics, kept = [], []
        for rows in chunking.row_slices(hidden_states.shape[0], token_chunks):
            x = F.linear(hidden_states[rows], weight, bias)
            y = F.linear(teacher_hidden_states[rows], teacher_weight, teacher_bias)
            chunk_statistics.append(divergence.overwrite(x, y, scale))
            if saved_d_hidden is not None:
                torch.mm(x, weight, out=saved_d_hidden[rows])
            if any(others) and (budget := budget - x.numel() * x.element_size()) >= 0:
                kept.append(x)
            del x, y
        statistics = DivergenceStatistics(*(torch.cat(each) for each in zip(*chunk_statistics)))
        ctx.options = divergence, vocab_chunks
        heads = hidden_states, weight, bias, teacher_hidden_states, teacher_weight, teacher_bias
        ctx.save_for_backward(*heads, saved_d_hidden, scale, *statistics, *kept)
        return statistics.divergence.squeeze(-1).clone()  # no view: autograd lets nobody write to one that a node gives

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpoints refuse a second look
        hidden_states, weight, bias, *teacher, saved_d_hidden, scale = saved[:8]
        divergence, vocab_chunks = ctx.options
        needs, nothing = ctx.needs_input_grad[:3], (None,) * 8
        if by_formula(grad):
            head = hidden_states, weight, bias
            return *gradients(partial(reference.head_divergence, divergence, teacher), head, needs, grad), *nothing
        factor = (grad * -divergence.factor / scale).unsqueeze(-1)
        d_hidden = None if saved_d_hidden is None else (saved_d_hidden * factor).to(hidden_states.dtype)
        if not any(needs[1:]):
            return d_hidden, None, None, *nothing
        statistics, kept = DivergenceStatistics(*saved[8:12]), saved[12:]
        done = sum(x.shape[0] for x in kept)
        rest = slice(done, None)
        scaled_hidden, hidden_scale = scale_into_range(hidden_states * factor, weight.dtype)
        scaled_factor, factor_scale = scale_into_range(factor.t(), weight.dtype)
        d_weight = torch.empty_like(weight) if needs[1] else None
        d_bias = torch.empty_like(bias) if needs[2] else None
        for words in chunking.vocab_slices(weight.shape[0], vocab_chunks):
            d_logits = [x[:, words] for x in kept]
            if done < hidden_states.shape[0]:
                x, y = (
                    F.linear(h[rest], w[words], None if b is None else b[words])
                    for h, w, b in ((hidden_states, weight, bias), teacher)
                )
                divergence.overwrite(x, y, scale, statistics.rows(rest))
                d_logits.append(x)
            x = torch.cat(d_logits)
            if d_weight is not None:
                torch.mm(x.t(), scaled_hidden, out=d_weight[words])
            if d_bias is not None:
                torch.mm(scaled_factor, x, out=d_bias[words].unsqueeze(0))
        for gradient, times in ((d_weight, hidden_scale), (d_bias, factor_scale)):
            if gradient is not None and times is not None:
                gradient.mul_(times)
        return d_hidden, d_weight, d_bias, *nothing
