"""The divergence of two heads' distributions in a row, and its gradient, whatever the chunks they are computed in.

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

from . import chunking
from .objective import Objective

LINEAR_FROM = 40.0  # from here on softplus(u) is u in float64, too


class DivergenceStatistics(NamedTuple):
    """Numbers of each row, over all words: ``[N, 1]`` each.

    Attributes:
        divergence: the divergence.
        lse: ``log Σ exp`` of the student's logits.
        teacher_lse: that of the teacher's.
        k: ``k``.
    """

    divergence: Tensor
    lse: Tensor
    teacher_lse: Tensor
    k: Tensor

    def rows(self, where: slice) -> DivergenceStatistics:
        """Return those of some rows."""
        return DivergenceStatistics(*(each[where] for each in self))


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

    def overwrite(
        self, x: Tensor, y: Tensor, scale: Tensor, statistics: DivergenceStatistics | None = None
    ) -> DivergenceStatistics:
        """Put the gradient for what the student's head gives, times ``-scale / c``, in its place.

        Args:
            x: what the student's head gives, ``[N, W]``.
            y: what the teacher's head gives, ``[N, W]``.
            scale: of no dimension.
            statistics: those of the rows; None where these are all their words: then they are computed.
        """
        chunks = [
            self._overwrite(x[rows], y[rows], scale, None if statistics is None else statistics.rows(rows))
            for rows in chunking.row_slices(x.shape[0], chunking.float32_chunk_count(2 * x.shape[0], x.shape[1]))
        ]
        return DivergenceStatistics(*(torch.cat(each) for each in zip(*chunks)))

    def _overwrite(
        self, x: Tensor, y: Tensor, scale: Tensor, statistics: DivergenceStatistics | None
    ) -> DivergenceStatistics:
        z = self.student.logits(x)
        tanh_squared = None if self.student.softcap is None else torch.div(z, self.student.softcap).square_()
        s, lse = _log_probs(z, statistics and statistics.lse)
        t, teacher_lse = _log_probs(self.teacher.logits(y), statistics and statistics.teacher_lse)
        del z
        u, p = t - s, s.exp_()
        if self.is_mixed:
            if self.beta != 0.5:
                u.add_(math.log(self.beta / (1 - self.beta)))
            softplus = F.softplus(u, threshold=LINEAR_FROM)
            a = softplus * p
        else:
            a = t.exp_() if self.beta == 0 else u * p
        if statistics is None:
            k = torch.ones_like(lse) if self.beta == 0 else a.sum(-1, keepdim=True)
            if self.is_mixed:
                teacher_sum = u.sub_(softplus).mul_(t.exp_()).sum(-1, keepdim=True)
                parts = self.beta, 1 - self.beta
                divergence = parts[0] * teacher_sum - parts[1] * k - sum(part * math.log(part) for part in parts)
            else:
                divergence = u.mul_(a).sum(-1, keepdim=True) if self.beta == 0 else -k
            statistics = DivergenceStatistics(divergence, lse, teacher_lse, k)
        a.addcmul_(p, -statistics.k)
        torch.mul(a if tanh_squared is None else a.addcmul_(a, tanh_squared, value=-1), scale, out=x)
        return statistics


def _log_probs(z: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of some words, and ``log Σ exp`` of all; without it ``z`` has all of them."""
    if lse is not None:
        return z.sub_(lse), lse
    log_probs = torch.log_softmax(z, -1)  # in one launch; it takes the same off all words
    return log_probs, z[:, :1] - log_probs[:, :1]
