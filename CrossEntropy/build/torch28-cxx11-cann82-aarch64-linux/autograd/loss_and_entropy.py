"""The loss of each row with the entropy of the head's words, and the gradient of both, from the same logits.

With ``z``, ``y`` and ``lse`` as in objective.py, without smoothing, ``d_i = z_i - lse`` and ``H = -Σ exp(d_i) · d_i``,

    dx_i = logit_scale · (1 - (z_i / softcap)²) · (exp(d_i) · (g - e · (d_i + H)) - [i = y] · g)

is the gradient for the gradients ``g`` of the loss ``lse - z_y`` and ``e`` of ``H``. In chunks, as in vocab_chunks.py,
``H = Σ w · (H_chunk - log w)`` over chunks with ``w = exp(lse_chunk - lse)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.derivatives import by_formula, gradients
from ..ops import chunking, reference
from ..ops.objective import LogitGradient, Objective, log_sum_exp
from .vocab_chunks import head_gradients, vocab_chunks


class LinearCrossEntropyWithEntropy(torch.autograd.Function):
    """Computes the loss and the entropy of each row, ``[N]`` each.

    ``apply(hidden_states, weight, bias, labels, objective, chunks, budget)`` takes what `LinearCrossEntropy` takes, but
    no shard.
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
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        chunk_statistics, chunk_label_logits, kept = [], [], []
        for chunk in vocab_chunks(weight, bias, labels, None, chunks):
            x = F.linear(hidden_states, chunk.weight, chunk.bias)
            chunk_statistics.append(_lse_and_entropy(x, objective))
            label_logits = objective.label_logits(x, chunk.inside)
            chunk_label_logits.append(torch.where(chunk.is_inside.squeeze(-1), label_logits, 0))
            if (budget := budget - x.numel() * x.element_size()) >= 0:
                kept.append(x)
            del x
        chunk_lse, chunk_entropies = (torch.stack(each) for each in zip(*chunk_statistics))
        lse = torch.logsumexp(chunk_lse, 0)
        log_weights = chunk_lse - lse
        entropy = (log_weights.exp() * (chunk_entropies - log_weights)).sum(0)
        label_logits = torch.stack(chunk_label_logits).sum(0)
        ctx.set_materialize_grads(False)  # who only looks at the entropy pays for no gradient of it
        ctx.options = objective, chunks
        ctx.are_logits = True  # what is kept, until a backward has made their gradient of them
        ctx.save_for_backward(hidden_states, weight, bias, labels, lse, label_logits, entropy, *kept)
        ignored = labels == objective.ignore_index
        return torch.where(ignored, 0.0, lse - label_logits), torch.where(ignored, 0.0, entropy)

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, lse, label_logits, entropy, *kept = ctx.saved_tensors
        objective, chunks = ctx.options
        needs, nothing = ctx.needs_input_grad[:3], (None,) * 4
        if grad is None and grad_entropy is None:
            return None, None, None, *nothing
        grad = torch.zeros_like(lse) if grad is None else grad
        if by_formula(grad, grad_entropy):
            both = torch.stack([grad, torch.zeros_like(grad) if grad_entropy is None else grad_entropy])
            head = hidden_states, weight, bias
            formula = partial(reference.linear_loss_and_entropy, labels=labels, objective=objective)
            return *gradients(lambda *head: torch.stack(formula(*head)), head, needs, both), *nothing
        ignored = labels == objective.ignore_index
        grad = torch.where(ignored, 0.0, grad)
        if grad_entropy is None:
            gradient = objective.gradient(grad, lse, label_logits, weight.shape[0])
        else:
            gradient = _gradient(objective, grad, torch.where(ignored, 0.0, grad_entropy), lse, label_logits, entropy)
        logits = [x.data for x in kept] if ctx.are_logits else []  # autograd need not know that they change
        ctx.are_logits = False
        [whole] = vocab_chunks(weight, bias, labels, None, 1)
        parts = zip_longest(vocab_chunks(weight, bias, labels, None, chunks), logits)
        d_hidden, d_weight, d_bias = head_gradients(hidden_states, whole, parts, gradient, needs)
        return None if d_hidden is None else d_hidden.to(hidden_states.dtype), d_weight, d_bias, *nothing


@dataclass(frozen=True)
class _LossAndEntropyGradient(LogitGradient):
    """The gradient with that of the entropy: ``exp(d) · (constant + rate · d)`` of each word; ``shift`` is ``-lse``.

    Attributes:
        constant: ``logit_scale · (g - e · H)``, ``[N, 1]``.
        rate: ``-logit_scale · e``, ``[N, 1]``.
    """

    constant: Tensor
    rate: Tensor

    def rows(self, where: slice) -> _LossAndEntropyGradient:
        """Return that of some rows."""
        at_label, sign = self.at_label[where], self.sign[where]
        return _LossAndEntropyGradient(
            self.objective, self.shift[where], None, at_label, sign, self.constant[where], self.rate[where]
        )

    def off_label(self, x: Tensor) -> Tensor:
        """Return the gradient for what the head gives, ``[N, W]``, as if no word were a label."""
        if self.objective.softcap is None:
            tanh_squared, d = None, self.objective.logits_plus(x, self.shift)
        else:
            z = self.objective.logits(x)
            tanh_squared, d = torch.div(z, self.objective.softcap).square_(), z.add_(self.shift)
        d_x = torch.addcmul(self.constant, d, self.rate).mul_(d.exp_())
        return d_x if tanh_squared is None else d_x.addcmul_(d_x, tanh_squared, value=-1)


def _gradient(
    objective: Objective, grad: Tensor, grad_entropy: Tensor, lse: Tensor, label_logits: Tensor, entropy: Tensor
) -> _LossAndEntropyGradient:
    d = label_logits - lse
    at_label = grad * torch.expm1(d) - grad_entropy * torch.exp(d) * (d + entropy)
    if objective.softcap is not None:
        at_label = at_label * (1 - (label_logits / objective.softcap).square())
    at_label, constant, rate = (
        (tensor * objective.logit_scale).unsqueeze(-1)
        for tensor in (at_label, grad - grad_entropy * entropy, -grad_entropy)
    )
    return _LossAndEntropyGradient(objective, -lse.unsqueeze(-1), None, at_label, torch.ones_like(rate), constant, rate)


def _lse_and_entropy(x: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return ``log Σ exp z`` and the entropy of what the head gives, ``[N, W]``: ``[N]`` each."""
    row_max, word = objective.row_max(x)
    max_log_probs, entropies = [], []
    for rows in chunking.row_slices(x.shape[0], chunking.float32_chunk_count(*x.shape)):
        log_probs = torch.log_softmax(objective.read_only_logits(x[rows]), -1)
        max_log_probs.append(log_probs.gather(1, word[rows]))
        entropies.append(-log_probs.mul_(log_probs.exp()).sum(-1))
        del log_probs
    return log_sum_exp(row_max, torch.cat(max_log_probs)).squeeze(-1), torch.cat(entropies)
