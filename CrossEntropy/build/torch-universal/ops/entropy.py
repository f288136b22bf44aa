"""The entropy of the head's words in a row, and the gradient of it and the loss, from the same logits.

With ``z``, ``y`` and ``lse`` as in objective.py, without smoothing, ``d_i = z_i - lse`` and ``H = -Σ exp(d_i) · d_i``,

    dx_i = logit_scale · (1 - (z_i / softcap)²) · (exp(d_i) · (g - e · (d_i + H)) - [i = y] · g)

is the gradient for the gradients ``g`` of the loss ``lse - z_y`` and ``e`` of ``H``. In chunks, as in vocab_chunks.py,
``H = Σ w · (H_chunk - log w)`` over chunks with ``w = exp(lse_chunk - lse)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import chunking
from .objective import LogitGradient, Objective, log_sum_exp


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


def loss_and_entropy_gradient(
    objective: Objective, grad: Tensor, grad_entropy: Tensor, lse: Tensor, label_logits: Tensor, entropy: Tensor
) -> LogitGradient:
    """Return the numbers of each row that its gradient is computed from, ``[N]`` each but for the objective."""
    d = label_logits - lse
    at_label = grad * torch.expm1(d) - grad_entropy * torch.exp(d) * (d + entropy)
    if objective.softcap is not None:
        at_label = at_label * (1 - (label_logits / objective.softcap).square())
    at_label, constant, rate = (
        (tensor * objective.logit_scale).unsqueeze(-1)
        for tensor in (at_label, grad - grad_entropy * entropy, -grad_entropy)
    )
    return _LossAndEntropyGradient(objective, -lse.unsqueeze(-1), None, at_label, torch.ones_like(rate), constant, rate)


def lse_and_entropy(x: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return ``log Σ exp z`` and the entropy of what the head gives, ``[N, W]``: ``[N]`` each."""
    row_max, word = objective.row_max(x)
    max_log_probs, entropies = [], []
    for rows in chunking.row_slices(x.shape[0], chunking.float32_chunk_count(*x.shape)):
        log_probs = torch.log_softmax(objective.read_only_logits(x[rows]), -1)
        max_log_probs.append(log_probs.gather(1, word[rows]))
        entropies.append(-log_probs.mul_(log_probs.exp()).sum(-1))
        del log_probs
    return log_sum_exp(row_max, torch.cat(max_log_probs)).squeeze(-1), torch.cat(entropies)
