"""Cross entropy of the logits of a head that is trained: in pieces of the vocabulary.

Each piece takes all tokens and some words. Forward keeps two numbers a token, ``log Σ exp`` and the logit of the label,
and the logits of the first pieces in the dtype of the head; backward turns them into their gradient in place, and
computes those of the other pieces again. So the rows of the weight's gradient are one product each, rounded once, the
weight is read once a product, and only the gradient of the hidden states is a sum over pieces, in float32. There the
label's word is left out of the products and added by itself: it is most of the gradient, and would be rounded with
every piece. by_tokens.py has heads that are not trained, and those with few logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import in_torch, one_word, pieces
from ._common.derivatives import by_formula, gradients
from .head import logits_and_statistics
from .objective import Gradient, Objective, statistics_dtype
from .shard import Shard


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss of each row ``[N]``.

    ``apply(hidden_states, weight, bias, labels, objective, shard, pieces, budget)`` takes ``[N, H]``, ``[W, H]``,
    ``[W]`` or None, ``[N]``, the options, the shard that the weight is or None, the number of pieces, and how many
    bytes of logits are kept.
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
        number: int,
        budget: int,
    ) -> Tensor:
        lse, picked, total, kept = [], [], [], []
        for part in cut(weight, bias, labels, shard, number):
            x, found = logits_and_statistics(hidden_states, part.weight, part.bias, part.inside, objective)
            lse.append(found[0])
            picked.append(torch.where(part.is_inside.squeeze(-1), found[1], 0))
            if found[2] is not None:
                total.append(found[2])
            if (budget := budget - x.numel() * x.element_size()) >= 0:
                kept.append(x)
            del x
        joined = torch.logsumexp(torch.stack(lse), 0)
        at_label = torch.stack(picked).sum(0)
        sums = torch.stack(total).sum(0) if total else None
        words = weight.shape[0]
        if shard is not None:
            words, joined, at_label = shard.words, shard.lse(joined), shard.total(at_label)
            sums = None if sums is None else shard.total(sums)
        ctx.options = objective, shard, number, words
        ctx.are_logits = True  # what is kept, until a backward has made their gradient of them
        ctx.save_for_backward(hidden_states, weight, bias, labels, joined, at_label, *kept)
        return torch.where(labels == objective.ignore_index, 0.0, objective.loss(joined, at_label, sums, words))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, lse, picked, *kept = ctx.saved_tensors
        objective, shard, number, words = ctx.options
        needs = ctx.needs_input_grad[:3]
        nothing = None, None, None, None, None
        if by_formula(grad):
            if shard is not None:
                raise RuntimeError(
                    "linear_cross_entropy: no second derivative, nor several gradients at once, with a shard"
                )
            found = gradients(
                lambda h, w, b: in_torch.linear_loss(h, w, b, labels, objective),
                (hidden_states, weight, bias),
                needs,
                grad,
            )
            return *found, *nothing
        counted = torch.where(labels == objective.ignore_index, 0.0, grad)
        gradient = objective.gradient(counted, lse, picked, words)
        [head] = cut(weight, bias, labels, shard, 1)
        parts = cut(weight, bias, labels, shard, number)
        logits = [x.data for x in kept] if ctx.are_logits else []  # autograd need not know that they change
        ctx.are_logits = False
        found = gradients_of_head(hidden_states, head, zip_longest(parts, logits), gradient, needs)
        if shard is not None and found[0] is not None:
            found = shard.total(found[0]), *found[1:]
        d_hidden = None if found[0] is None else found[0].to(hidden_states.dtype)
        return d_hidden, *found[1:], *nothing


class Part(NamedTuple):
    """A piece of the vocabulary.

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


def cut(weight: Tensor, bias: Tensor | None, labels: Tensor, shard: Shard | None, number: int) -> Iterator[Part]:
    """Cut the vocabulary, or the shard of it that a weight is, into pieces."""
    first = 0 if shard is None else shard.start
    for words in pieces.of_words(weight.shape[0], number):
        local = (labels - (first + words.start)).unsqueeze(-1)
        inside = local.clamp(0, words.stop - words.start - 1)
        yield Part(words, weight[words], None if bias is None else bias[words], inside, local == inside)


def gradients_of_head(
    hidden_states: Tensor,
    head: Part,
    parts: Iterable[tuple[Part, Tensor | None]],
    gradient: Gradient,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states, in the dtype of the statistics, of the weight and of the bias.

    Args:
        head: all words that it has.
        parts: pieces of them with their logits, which are overwritten; None where they are to be computed.
    """
    needs_hidden, needs_weight, needs_bias = needs
    weight, bias = head.weight, head.bias
    dtype = statistics_dtype(hidden_states.dtype)
    sign = gradient.sign.to(hidden_states.dtype)
    signed = hidden_states * sign if needs_weight else None
    d_hidden = torch.zeros_like(hidden_states, dtype=dtype) if needs_hidden else None
    d_weight = weight.new_empty(weight.shape) if needs_weight else None
    d_bias = bias.new_empty(bias.shape) if bias is not None and needs_bias else None
    for part, found in parts:
        if found is None:
            found = F.linear(hidden_states, part.weight, part.bias)
        gradient.write(found, found)
        others, places = found.gather(1, part.inside), one_word.places(part.inside)
        if d_hidden is not None:
            one_word.write(found, places, others.masked_fill(part.is_inside, 0))
            d_hidden.add_(found @ part.weight)
        one_word.write(found, places, torch.where(part.is_inside, gradient.at_label.to(found.dtype), others))
        if d_weight is not None:
            torch.mm(found.t(), signed, out=d_weight[part.words])
        if d_bias is not None:
            torch.mm(sign.t(), found, out=d_bias[part.words].unsqueeze(0))
        del found
    if d_hidden is not None:
        at_label = torch.where(head.is_inside, gradient.at_label, 0)
        d_hidden.addcmul_(at_label, weight.index_select(0, head.inside.squeeze(-1)).to(dtype)).mul_(sign)
    return d_hidden, d_weight, d_bias
