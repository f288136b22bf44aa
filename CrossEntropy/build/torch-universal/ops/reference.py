"""The same loss by operators of torch, with all logits in memory.

It is what torch differentiates twice, transforms and distributes: whatever has rules for every operator of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .divergence import LINEAR_FROM, Divergence
from .objective import Objective, statistics_dtype


def logits_loss(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Return the loss of each row ``[N]`` of logits ``[N, V]``, before scale and softcap."""
    z = _scaled(logits, objective)
    counted = labels != objective.ignore_index
    inside = torch.where(counted, labels, 0).clamp(0, z.shape[-1] - 1)
    loss = F.cross_entropy(z, inside, reduction="none", label_smoothing=objective.label_smoothing)
    if objective.z_loss:
        loss = loss + objective.z_loss * torch.logsumexp(z, -1).square()
    return torch.where(counted, loss, 0.0)


def linear_loss(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective
) -> Tensor:
    """Return the loss of each row ``[N]`` of the head's logits ``hidden_states @ weightᵀ + bias``."""
    return logits_loss(F.linear(hidden_states, weight, bias), labels, objective)


def linear_loss_and_entropy(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Return the loss and the entropy ``[N]`` of each row of the head's logits."""
    logits = F.linear(hidden_states, weight, bias)
    log_probs = torch.log_softmax(_scaled(logits, objective), -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return logits_loss(logits, labels, objective), torch.where(labels == objective.ignore_index, 0.0, entropy)


def head_divergence(
    divergence: Divergence,
    teacher: Sequence[Tensor | None],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return the divergence of two heads' distributions in each row ``[N]``."""
    s, t = (
        torch.log_softmax(_scaled(F.linear(*head), objective), -1)
        for head, objective in (
            ((hidden_states, weight, bias), divergence.student),
            (teacher, divergence.teacher),
        )
    )
    beta = divergence.beta
    if not divergence.is_mixed:
        return (t.exp() * (t - s) if beta == 0 else s.exp() * (s - t)).sum(-1)
    student_part, teacher_part = s + math.log(1 - beta), t + math.log(beta)
    mixture = student_part + F.softplus(teacher_part - student_part, threshold=LINEAR_FROM)
    return (beta * t.exp() * (t - mixture) + (1 - beta) * s.exp() * (s - mixture)).sum(-1)


def _scaled(logits: Tensor, objective: Objective) -> Tensor:
    z = logits.to(statistics_dtype(logits.dtype)) * objective.logit_scale
    return z if objective.softcap is None else objective.softcap * torch.tanh(z / objective.softcap)
