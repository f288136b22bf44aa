"""The same loss by operators of torch, with all logits in memory.

It is what torch differentiates twice, transforms and distributes: whatever has rules for every operator of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .objective import Objective, statistics_dtype


def loss(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Return the loss of each row ``[N]`` of logits ``[N, V]``, before scale and softcap."""
    z = logits.to(statistics_dtype(logits.dtype)) * objective.logit_scale
    if objective.softcap is not None:
        z = objective.softcap * torch.tanh(z / objective.softcap)
    counted = labels != objective.ignore_index
    inside = torch.where(counted, labels, 0).clamp(0, z.shape[-1] - 1)
    found = F.cross_entropy(z, inside, reduction="none", label_smoothing=objective.label_smoothing)
    if objective.z_loss:
        found = found + objective.z_loss * torch.logsumexp(z, -1).square()
    return torch.where(counted, found, 0.0)


def linear_loss(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective
) -> Tensor:
    """Return the loss of each row ``[N]`` of the head's logits ``hidden_states @ weightᵀ + bias``."""
    return loss(F.linear(hidden_states, weight, bias), labels, objective)
