"""The loss of a row of logits and its gradient: the formulas, whatever the chunks in which they are computed.

With ``x`` what the head gives, ``z = logit_scale · x``, or ``z = softcap · tanh(logit_scale · x / softcap)``, label
``y``, smoothing ``e``, ``V`` words and ``lse = log Σ exp z``, the loss of a row is

    lse - (1 - e) · z_y - e · mean(z) + z_loss · lse²

and its gradient, times the gradient ``g`` that arrives for the row,

    dx_i = logit_scale · (1 - (z_i / softcap)²) · (c · exp(z_i - lse) - s - [i = y] · (1 - e) · g)
    c = g · (1 + 2 · z_loss · lse)        s = e · g / V

The factor ``|c · logit_scale|`` goes into the exponent, so that no pass over words is needed for it, and its sign to
the rows that are multiplied later. The value at the label has a formula of its own: ``exp(z_y - lse) - 1`` cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import chunking

# ``log Σ exp z``, ``z`` at the label and, with label smoothing, ``Σ z`` of each row: ``[N]`` each
LogitStatistics = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Objective:
    """The options of a loss.

    Attributes:
        ignore_index: the label of rows that do not count.
        label_smoothing: the part of a label that all words share.
        z_loss: the weight of ``lse²``.
        logit_scale: what logits are multiplied with.
        softcap: what the scaled logits are kept below by tanh; None for no bound.
    """

    ignore_index: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def read_only_logits(self, x: Tensor) -> Tensor:
        """Return ``z`` of what the head gives, ``[N, W]``, in the dtype of the statistics; it may be ``x`` itself."""
        return x if self.is_identity and x.dtype is statistics_dtype(x.dtype) else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return ``z`` of what the head gives, ``[N, W]``, in the dtype of the statistics: a tensor of its own."""
        # not copy=True: torch_npu up to its releases for CANN 9.0 hands back x itself then (ToKernelNpu.cpp)
        z = x.clone() if x.dtype == statistics_dtype(x.dtype) else x.to(statistics_dtype(x.dtype))
        if self.softcap is not None:
            return z.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap)
        return z if self.logit_scale == 1 else z.mul_(self.logit_scale)

    @property
    def is_identity(self) -> bool:
        """Whether ``z`` is what the head gives."""
        return self.softcap is None and self.logit_scale == 1

    def logits_plus(self, x: Tensor, shift: Tensor) -> Tensor:
        """Return ``z + shift`` of what the head gives, ``[N, W]``, in the dtype of the statistics, which shift has.

        16 and 32 bits are added in one pass. Of their difference the logits would be cast into a copy first: CANN's
        ops-math, math/add and math/sub, op_api/aclnn_add.cpp and aclnn_sub.cpp.
        """
        return torch.add(x, shift) if self.is_identity else self.logits(x).add_(shift)

    def row_max(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest ``z`` of each row of what the head gives, ``[N, W]``, and its word: ``[N, 1]`` each."""
        extreme, word = (x.max if self.logit_scale > 0 else x.min)(-1, keepdim=True)
        return self.logits(extreme), word

    def label_logits(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return ``z`` at labels ``[N, 1]`` of what the head gives, ``[N, W]``: ``[N]``."""
        return self.logits(x.gather(1, labels)).squeeze(-1)

    def statistics(self, x: Tensor, labels: Tensor) -> LogitStatistics:
        """Return the numbers of each row that its loss and gradient are computed from.

        Args:
            x: what the head gives, ``[N, W]``.
            labels: ``[N, 1]``, in ``[0, W)``.
        """
        row_max, word = self.row_max(x)
        log_probs, sums = [], []
        for rows in chunking.row_slices(x.shape[0], chunking.float32_chunk_count(*x.shape)):
            z = self.read_only_logits(x[rows])
            log_probs.append(torch.log_softmax(z, -1).gather(1, word[rows]))
            if self.label_smoothing:
                sums.append(z.sum(-1))
            del z
        lse = log_sum_exp(row_max, torch.cat(log_probs)).squeeze(-1)
        return lse, self.label_logits(x, labels), torch.cat(sums) if sums else None

    def loss(self, lse: Tensor, label_logit: Tensor, logit_sum: Tensor | None, words: int) -> Tensor:
        """Return the loss of each row ``[N]``.

        Args:
            lse: ``log Σ exp z``, ``[N]``.
            label_logit: ``z`` at the label, ``[N]``.
            logit_sum: ``Σ z``, ``[N]``; needed with label smoothing only.
            words: the size of the vocabulary.
        """
        loss = lse - label_logit
        if self.label_smoothing:
            assert logit_sum is not None
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * (lse - logit_sum / words)
        return loss if not self.z_loss else loss + self.z_loss * lse.square()

    def gradient(self, grad: Tensor, lse: Tensor, label_logit: Tensor, words: int) -> LogitGradient:
        """Return the numbers of each row that its gradient is computed from.

        Args:
            grad: that of each row's loss, ``[N]``, zero for rows that do not count.
            lse: as for `loss`.
            label_logit: as for `loss`.
            words: the size of the vocabulary.
        """
        z_slope = 2 * self.z_loss * lse if self.z_loss else None
        slope = grad if z_slope is None else grad * (1 + z_slope)
        smoothing = grad * (self.label_smoothing / words) if self.label_smoothing else None
        at_label = slope * torch.expm1(label_logit - lse)
        if z_slope is not None:
            at_label = at_label + grad * z_slope
        if smoothing is not None:
            at_label = at_label + grad * self.label_smoothing - smoothing
        if self.softcap is not None:
            at_label = at_label * (1 - (label_logit / self.softcap).square())
        sign = torch.where(slope < 0, -1.0, 1.0).to(slope.dtype)
        if self.logit_scale < 0:
            sign = -sign
        factor = sign * self.logit_scale
        return LogitGradient(
            objective=self,
            shift=((slope.abs() * abs(self.logit_scale)).log() - lse).unsqueeze(-1),
            smoothing=None if smoothing is None else (smoothing * factor).unsqueeze(-1),
            at_label=(at_label * factor).unsqueeze(-1),
            sign=sign.unsqueeze(-1),
        )


@dataclass(frozen=True)
class LogitGradient:
    """The gradient of logits by numbers of each row, ``[N, 1]`` each; times ``sign`` it is that of ``x``.

    Attributes:
        objective: the loss.
        shift: ``log |c · logit_scale| - lse``.
        smoothing: what is taken off for all words; None without label smoothing.
        at_label: the value at the label.
        sign: 1, or -1 where ``c · logit_scale`` is negative.
    """

    objective: Objective
    shift: Tensor
    smoothing: Tensor | None
    at_label: Tensor
    sign: Tensor

    def rows(self, where: slice) -> LogitGradient:
        """Return that of some rows."""
        smoothing = None if self.smoothing is None else self.smoothing[where]
        return LogitGradient(self.objective, self.shift[where], smoothing, self.at_label[where], self.sign[where])

    def write(self, x: Tensor, out: Tensor) -> None:
        """Put the gradient for what the head gives, ``[N, W]``, into a tensor like it, as if no word were a label."""
        for rows in chunking.row_slices(x.shape[0], chunking.float32_chunk_count(*x.shape)):
            out[rows].copy_(self.rows(rows).off_label(x[rows]))

    def off_label(self, x: Tensor) -> Tensor:
        """Return the gradient for what the head gives, ``[N, W]``, as if no word were a label."""
        objective = self.objective
        if objective.softcap is None:
            d_x = objective.logits_plus(x, self.shift).exp_()
            return d_x if self.smoothing is None else d_x.sub_(self.smoothing)
        z = objective.logits(x)
        d_x = torch.add(z, self.shift).exp_()
        if self.smoothing is not None:
            d_x.sub_(self.smoothing)
        z.div_(objective.softcap).square_()
        return d_x.addcmul_(d_x, z, value=-1)


def log_sum_exp(row_max: Tensor, log_prob: Tensor) -> Tensor:
    """Return ``log Σ exp z`` of rows from their largest ``z`` and what ``log_softmax`` has made of it.

    ``logsumexp`` passes three times over logits in float32, and writes a copy of them: CANN's ops-math,
    math/reduce_log_sum_exp, aclnn_logsumexp.cpp. ``log_softmax`` takes it off every word in one launch. The largest is
    finite where any is, and loses least to rounding.
    """
    return torch.where(row_max.isinf(), row_max, row_max - log_prob)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over words: float32, float64 for tensors in float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
