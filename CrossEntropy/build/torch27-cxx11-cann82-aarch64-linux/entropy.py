"""The loss of each row with the entropy of what the head gives, and the gradient of both, from the same logits.

With ``z``, ``y`` and ``lse`` as in objective.py, without smoothing, ``d_i = z_i - lse`` and ``H = -Σ exp(d_i) · d_i``,

    dx_i = logit_scale · (1 - (z_i / softcap)²) · (exp(d_i) · (g - e · (d_i + H)) - [i = y] · g)

is the gradient for the gradients ``g`` of the loss ``lse - z_y`` and ``e`` of ``H``. Cut into pieces as in linear.py,
``H = Σ w · (H_piece - log w)`` over pieces with ``w = exp(lse_piece - lse)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from . import in_torch, pieces
from ._common.derivatives import by_formula, gradients
from .linear import cut, gradients_of_head
from .objective import Gradient, Objective, log_sum_exp


class LinearCrossEntropyWithEntropy(torch.autograd.Function):
    """Computes the loss and the entropy of each row, ``[N]`` each.

    ``apply(hidden_states, weight, bias, labels, objective, pieces, budget)`` takes what `LinearCrossEntropy` takes, but
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
        number: int,
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        found, picked, kept = [], [], []
        for part in cut(weight, bias, labels, None, number):
            x = F.linear(hidden_states, part.weight, part.bias)
            found.append(_lse_and_entropy(x, objective))
            at_label = objective.logits(x.gather(1, part.inside)).squeeze(-1)
            picked.append(torch.where(part.is_inside.squeeze(-1), at_label, 0))
            if (budget := budget - x.numel() * x.element_size()) >= 0:
                kept.append(x)
            del x
        each, entropies = (torch.stack(one) for one in zip(*found))
        lse = torch.logsumexp(each, 0)
        log_share = each - lse
        entropy = (log_share.exp() * (entropies - log_share)).sum(0)
        at_label = torch.stack(picked).sum(0)
        ctx.set_materialize_grads(False)  # who only looks at the entropy pays for no gradient of it
        ctx.options = objective, number
        ctx.are_logits = True  # what is kept, until a backward has made their gradient of them
        ctx.save_for_backward(hidden_states, weight, bias, labels, lse, at_label, entropy, *kept)
        ignored = labels == objective.ignore_index
        return torch.where(ignored, 0.0, lse - at_label), torch.where(ignored, 0.0, entropy)

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, labels, lse, picked, entropy, *kept = ctx.saved_tensors
        objective, number = ctx.options
        needs, nothing = ctx.needs_input_grad[:3], (None,) * 4
        if grad is None and grad_entropy is None:
            return None, None, None, *nothing
        grad = torch.zeros_like(lse) if grad is None else grad
        if by_formula(grad, grad_entropy):
            both = torch.stack([grad, torch.zeros_like(grad) if grad_entropy is None else grad_entropy])
            found = gradients(
                lambda h, w, b: torch.stack(in_torch.linear_loss_and_entropy(h, w, b, labels, objective)),
                (hidden_states, weight, bias),
                needs,
                both,
            )
            return *found, *nothing
        ignored = labels == objective.ignore_index
        grad = torch.where(ignored, 0.0, grad)
        if grad_entropy is None:
            gradient = objective.gradient(grad, lse, picked, weight.shape[0])
        else:
            gradient = _gradient(objective, grad, torch.where(ignored, 0.0, grad_entropy), lse, picked, entropy)
        logits = [x.data for x in kept] if ctx.are_logits else []  # autograd need not know that they change
        ctx.are_logits = False
        [head] = cut(weight, bias, labels, None, 1)
        parts = zip_longest(cut(weight, bias, labels, None, number), logits)
        d_hidden, *others = gradients_of_head(hidden_states, head, parts, gradient, needs)
        return None if d_hidden is None else d_hidden.to(hidden_states.dtype), *others, *nothing


@dataclass(frozen=True)
class _GradientOfBoth(Gradient):
    """The gradient with that of the entropy: ``exp(d) · (constant + rate · d)`` of each word; ``shift`` is ``-lse``.

    Attributes:
        constant: ``logit_scale · (g - e · H)``, ``[N, 1]``.
        rate: ``-logit_scale · e``, ``[N, 1]``.
    """

    constant: Tensor
    rate: Tensor

    def rows(self, where: slice) -> _GradientOfBoth:
        """Return that of some rows."""
        at_label, sign = self.at_label[where], self.sign[where]
        return _GradientOfBoth(
            self.objective, self.shift[where], None, at_label, sign, self.constant[where], self.rate[where]
        )

    def of_words(self, x: Tensor) -> Tensor:
        """Return the gradient for what the head gives, ``[N, W]``, as if no word were a label."""
        if self.objective.softcap is None:
            bend, d = None, self.objective.shifted(x, self.shift)
        else:
            z = self.objective.logits(x)
            bend, d = torch.div(z, self.objective.softcap).square_(), z.add_(self.shift)
        found = torch.addcmul(self.constant, d, self.rate).mul_(d.exp_())
        return found if bend is None else found.addcmul_(found, bend, value=-1)


def _gradient(
    objective: Objective, grad: Tensor, grad_entropy: Tensor, lse: Tensor, picked: Tensor, entropy: Tensor
) -> _GradientOfBoth:
    d = picked - lse
    at_label = grad * torch.expm1(d) - grad_entropy * torch.exp(d) * (d + entropy)
    if objective.softcap is not None:
        at_label = at_label * (1 - (picked / objective.softcap).square())
    at_label, constant, rate = (
        (tensor * objective.logit_scale).unsqueeze(-1)
        for tensor in (at_label, grad - grad_entropy * entropy, -grad_entropy)
    )
    return _GradientOfBoth(objective, -lse.unsqueeze(-1), None, at_label, torch.ones_like(rate), constant, rate)


def _lse_and_entropy(x: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return ``log Σ exp z`` and the entropy of what the head gives, ``[N, W]``: ``[N]`` each."""
    largest, word = objective.largest(x)
    found, entropies = [], []
    for rows in pieces.of_rows(x.shape[0], pieces.for_statistics(*x.shape)):
        log_probs = torch.log_softmax(objective.read(x[rows]), -1)
        found.append(log_probs.gather(1, word[rows]))
        entropies.append(-log_probs.mul_(log_probs.exp()).sum(-1))
        del log_probs
    return log_sum_exp(largest, torch.cat(found)).squeeze(-1), torch.cat(entropies)
