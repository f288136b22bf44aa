"""Cross entropy of the logits of a head that is trained: in chunks of the vocabulary.

Each chunk takes all tokens and some words. Forward keeps two numbers a token, ``log Σ exp`` and the logit of the label,
and the logits of the first chunks in the dtype of the head; backward turns them into their gradient in place, and
computes those of the other chunks again. So the rows of the weight's gradient are one product each, rounded once, the
weight is read once a product, and only the gradient of the hidden states is a sum over chunks, in float32. There the
label's word is left out of the products and added by itself: it is most of the gradient, and would be rounded with
every chunk. token_chunks.py has heads that are not trained, and those with few logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.derivatives import by_formula, gradients
from ..ops import chunking, reference
from ..ops.entropy import loss_and_entropy_gradient, lse_and_entropy
from ..ops.head_logits import logits_and_statistics
from ..ops.label_scatter import row_and_word, write_one_per_row
from ..ops.objective import LogitGradient, Objective, statistics_dtype
from ..shard import Shard


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss of each row ``[N]``, and the entropy of the head's words if it is asked for.

    ``apply(hidden_states, weight, bias, labels, objective, shard, chunks, budget, wants_entropy)`` takes ``[N, H]``,
    ``[W, H]``, ``[W]`` or None, ``[N]``, the options, the shard that the weight is or None, the number of chunks, how
    many bytes of logits are kept, and whether it gives the entropy ``[N]`` too, of a head that is no shard, without
    smoothing.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        objective: Objective,
        shard: Shard | None,
        chunks: int,
        budget: int,
        wants_entropy: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        chunk_statistics, kept = [], []
        for chunk in vocab_chunks(weight, bias, labels, shard, chunks):
            part_sums = part_entropy = None
            if wants_entropy:
                x = F.linear(hidden_states, chunk.weight, chunk.bias)
                part_lse, part_entropy = lse_and_entropy(x, objective)
                part_logits = objective.label_logits(x, chunk.inside)
            else:
                x, (part_lse, part_logits, part_sums) = logits_and_statistics(
                    hidden_states, chunk.weight, chunk.bias, chunk.inside, objective
                )
            part_logits = torch.where(chunk.is_inside.squeeze(-1), part_logits, 0)
            chunk_statistics.append((part_lse, part_logits, part_sums, part_entropy))
            if (budget := budget - x.numel() * x.element_size()) >= 0:
                kept.append(x)
            del x
        chunk_lse, label_logits, logit_sums, chunk_entropies = (
            None if parts[0] is None else torch.stack(parts) for parts in zip(*chunk_statistics)
        )
        lse, label_logits = torch.logsumexp(chunk_lse, 0), label_logits.sum(0)
        logit_sums = None if logit_sums is None else logit_sums.sum(0)
        entropy = None
        if chunk_entropies is not None:
            log_weights = chunk_lse - lse
            entropy = (log_weights.exp() * (chunk_entropies - log_weights)).sum(0)
        words = weight.shape[0]
        if shard is not None:
            words, lse, label_logits = shard.words, shard.lse(lse), shard.total(label_logits)
            logit_sums = None if logit_sums is None else shard.total(logit_sums)
        ctx.set_materialize_grads(False)  # who only looks at the entropy pays for no gradient of it
        ctx.options = objective, shard, chunks, words
        ctx.are_logits = True  # what is kept, until a backward has made their gradient of them
        ctx.save_for_backward(hidden_states, weight, bias, labels, lse, label_logits, entropy, *kept)
        ignored = labels == objective.ignore_index
        loss = torch.where(ignored, 0.0, objective.loss(lse, label_logits, logit_sums, words))
        return loss if entropy is None else (loss, torch.where(ignored, 0.0, entropy))

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, lse, label_logits, entropy, *kept = ctx.saved_tensors
        objective, shard, chunks, words = ctx.options
        needs, nothing = ctx.needs_input_grad[:3], (None,) * 6
        if grad is None and grad_entropy is None:
            return None, None, None, *nothing
        grad = torch.zeros_like(lse) if grad is None else grad
        if by_formula(grad, grad_entropy):
            if shard is not None:
                raise RuntimeError(
                    "linear_cross_entropy: no second derivative, nor several gradients at once, with a shard"
                )
            head = hidden_states, weight, bias
            if entropy is None:
                formula = partial(reference.linear_loss, labels=labels, objective=objective)
                return *gradients(formula, head, needs, grad), *nothing
            both = torch.stack([grad, torch.zeros_like(grad) if grad_entropy is None else grad_entropy])
            formula = partial(reference.linear_loss_and_entropy, labels=labels, objective=objective)
            return *gradients(lambda *head: torch.stack(formula(*head)), head, needs, both), *nothing
        ignored = labels == objective.ignore_index
        grad = torch.where(ignored, 0.0, grad)
        if grad_entropy is None:
            gradient = objective.gradient(grad, lse, label_logits, words)
        else:
            grad_entropy = torch.where(ignored, 0.0, grad_entropy)
            gradient = loss_and_entropy_gradient(objective, grad, grad_entropy, lse, label_logits, entropy)
        logits = [x.data for x in kept] if ctx.are_logits else []  # autograd need not know that they change
        ctx.are_logits = False
        [whole] = vocab_chunks(weight, bias, labels, shard, 1)
        parts = zip_longest(vocab_chunks(weight, bias, labels, shard, chunks), logits)
        d_hidden, d_weight, d_bias = head_gradients(hidden_states, whole, parts, gradient, needs)
        if d_hidden is not None:
            d_hidden = (d_hidden if shard is None else shard.total(d_hidden)).to(hidden_states.dtype)
        return d_hidden, d_weight, d_bias, *nothing


class VocabChunk(NamedTuple):
    """A part of the vocabulary.

    Attributes:
        words: its words, as a slice of the weight's rows.
        weight: their rows ``[W, H]``.
        bias: theirs ``[W]``, or None.
        inside: the labels counted from its first word, ``[N, 1]``, and kept within it.
        is_inside: whether a label is in it, ``[N, 1]``.
    """

    words: slice
    weight: Tensor
    bias: Tensor | None
    inside: Tensor
    is_inside: Tensor


def vocab_chunks(
    weight: Tensor, bias: Tensor | None, labels: Tensor, shard: Shard | None, chunks: int
) -> Iterator[VocabChunk]:
    """Cut the vocabulary, or the shard of it that a weight is, into chunks."""
    first = 0 if shard is None else shard.start
    for words in chunking.vocab_slices(weight.shape[0], chunks):
        local = (labels - (first + words.start)).unsqueeze(-1)
        inside = local.clamp(0, words.stop - words.start - 1)
        yield VocabChunk(words, weight[words], None if bias is None else bias[words], inside, local == inside)


def head_gradients(
    hidden_states: Tensor,
    whole: VocabChunk,
    parts: Iterable[tuple[VocabChunk, Tensor | None]],
    gradient: LogitGradient,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states, in the dtype of the statistics, of the weight and of the bias.

    Args:
        whole: all words of the head.
        parts: chunks of them with their logits, which are overwritten; None where they are to be computed.
    """
    needs_hidden, needs_weight, needs_bias = needs
    weight, bias = whole.weight, whole.bias
    dtype = statistics_dtype(hidden_states.dtype)
    sign = gradient.sign.to(hidden_states.dtype)
    signed = hidden_states * sign if needs_weight else None
    d_hidden = torch.zeros_like(hidden_states, dtype=dtype) if needs_hidden else None
    d_weight = weight.new_empty(weight.shape) if needs_weight else None
    d_bias = bias.new_empty(bias.shape) if bias is not None and needs_bias else None
    for part, x in parts:
        if x is None:
            x = F.linear(hidden_states, part.weight, part.bias)
        gradient.write(x, x)
        off_label, positions = x.gather(1, part.inside), row_and_word(part.inside)
        if d_hidden is not None:
            write_one_per_row(x, positions, off_label.masked_fill(part.is_inside, 0))
            d_hidden.add_(x @ part.weight)
        write_one_per_row(x, positions, torch.where(part.is_inside, gradient.at_label.to(x.dtype), off_label))
        if d_weight is not None:
            torch.mm(x.t(), signed, out=d_weight[part.words])
        if d_bias is not None:
            torch.mm(sign.t(), x, out=d_bias[part.words].unsqueeze(0))
        del x
    if d_hidden is not None:
        at_label = torch.where(whole.is_inside, gradient.at_label, 0)
        d_hidden.addcmul_(at_label, weight.index_select(0, whole.inside.squeeze(-1)).to(dtype)).mul_(sign)
    return d_hidden, d_weight, d_bias
