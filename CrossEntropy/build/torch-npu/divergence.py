"""What the distributions of two heads differ by in a row, and its gradient, whatever the pieces they are computed in.

With the log probabilities ``s`` of the student and ``t`` of the teacher, ``p = exp(s)``, ``q = exp(t)``, ``b = beta``
and the mixture ``m = log((1 - b) · p + b · q)``, the generalised Jensen-Shannon divergence of a row is

    b · Σ q · (t - m) + (1 - b) · Σ p · (s - m)

(Agarwal et al., arXiv:2306.13649, equation 1). In its limits that is divided by b or by 1 - b, as TRL does:
``Σ q · (t - s)`` for b = 0, the forward KL, and ``Σ p · (s - t)`` for b = 1, the reverse one. With
``u = t - s + log(b / (1 - b))``,

    m - s = softplus(u) + log(1 - b)        m - t = softplus(u) - u + log(b)

without an exponential of more than one. The gradient for the student's logits is in all three, before the slope of a
softcap,

    c · (k · p - a)        a = q, p · softplus(u) or p · (t - s)        k = Σ a

with ``c = logit_scale``, times 1 - b where there is a mixture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import pieces
from .objective import Objective

LINEAR_FROM = 40.0  # from here on softplus(u) is u in float64, too


class Statistics(NamedTuple):
    """What is known of rows whose words were all seen: ``[N, 1]`` each.

    Attributes:
        divergence: what the heads differ by.
        lse: ``log Σ exp`` of the student's logits.
        teacher_lse: that of the teacher's.
        share: ``k``.
    """

    divergence: Tensor
    lse: Tensor
    teacher_lse: Tensor
    share: Tensor

    def rows(self, where: slice) -> Statistics:
        """Return those of some rows."""
        return Statistics(*(each[where] for each in self))


@dataclass(frozen=True)
class Divergence:
    """A generalised Jensen-Shannon divergence of two heads.

    Attributes:
        beta: the teacher's part of the mixture; 0 for the forward KL, 1 for the reverse one.
        student: scale and softcap of the student's logits.
        teacher: those of the teacher's.
    """

    beta: float
    student: Objective
    teacher: Objective

    @property
    def is_mixed(self) -> bool:
        """Whether there is a mixture: otherwise it is a KL divergence."""
        return 0 < self.beta < 1

    @property
    def factor(self) -> float:
        """What all gradients have: ``c``."""
        return self.student.logit_scale * (1 - self.beta if self.is_mixed else 1)

    def overwrite(self, x: Tensor, y: Tensor, unit: Tensor, known: Statistics | None = None) -> Statistics:
        """Put the gradient for what the student's head gives, times ``-unit / c``, in its place.

        Args:
            x: what the student's head gives, ``[N, W]``.
            y: what the teacher's head gives, ``[N, W]``.
            unit: of no dimension.
            known: what is known of the rows; None where these are all their words, and it is to be found.
        """
        found = [
            self._overwrite(x[rows], y[rows], unit, None if known is None else known.rows(rows))
            for rows in pieces.of_rows(x.shape[0], pieces.for_statistics(2 * x.shape[0], x.shape[1]))
        ]
        return Statistics(*(torch.cat(each) for each in zip(*found)))

    def _overwrite(self, x: Tensor, y: Tensor, unit: Tensor, known: Statistics | None) -> Statistics:
        z = self.student.logits(x)
        bend = None if self.student.softcap is None else torch.div(z, self.student.softcap).square_()
        s, lse = _log_probs(z, known and known.lse)
        t, teacher_lse = _log_probs(self.teacher.logits(y), known and known.teacher_lse)
        del z
        u, p = t - s, s.exp_()
        if self.is_mixed:
            if self.beta != 0.5:
                u.add_(math.log(self.beta / (1 - self.beta)))
            above = F.softplus(u, threshold=LINEAR_FROM)
            a = above * p
        else:
            a = t.exp_() if self.beta == 0 else u * p
        if known is None:
            share = torch.ones_like(lse) if self.beta == 0 else a.sum(-1, keepdim=True)
            if self.is_mixed:
                of_teacher = u.sub_(above).mul_(t.exp_()).sum(-1, keepdim=True)
                parts = self.beta, 1 - self.beta
                divergence = parts[0] * of_teacher - parts[1] * share - sum(part * math.log(part) for part in parts)
            else:
                divergence = u.mul_(a).sum(-1, keepdim=True) if self.beta == 0 else -share
            known = Statistics(divergence, lse, teacher_lse, share)
        a.addcmul_(p, -known.share)
        torch.mul(a if bend is None else a.addcmul_(a, bend, value=-1), unit, out=x)
        return known


def _log_probs(z: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of some words, and ``log Σ exp`` of all, which ``z`` is where it is not known."""
    if lse is not None:
        return z.sub_(lse), lse
    found = torch.log_softmax(z, -1)  # in one launch; what it took off is the same for all words
    return found, z[:, :1] - found[:, :1]
