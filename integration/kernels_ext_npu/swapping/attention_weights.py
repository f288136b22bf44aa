"""Masks for the formulas of models, which add them to scores: they compute the weights of attention for who asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def added(
    mask: Any, query: Tensor, key: Tensor, is_causal: bool = True, indices: Tensor | None = None
) -> Tensor | None:
    """Return a mask as the formulas take it: floating ``[B or 1, N or 1, S_q, S_k]``, added to the scores.

    Args:
        mask: a description of the kernel, or a tensor: bool or floating of four dimensions, or of padding ``[B, S]``.
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``.
        is_causal: whether a query sees no key behind its own, where the mask is of padding.
        indices: ``[B, S_q, k]``, the keys that a query sees of those that the mask leaves it; all by default.
    """
    queries, keys = query.shape[2], key.shape[2]
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=query.device)
        lowest = torch.finfo(query.dtype).min
        beyond = torch.zeros_like(chosen, dtype=query.dtype).masked_fill(
            ~chosen.scatter(-1, indices.long(), True), lowest
        )
        others = added(mask, query, key, is_causal)
        return beyond[:, None] if others is None else others.minimum(beyond[:, None])
    if mask is None:
        return None
    seen = mask[..., :keys] if isinstance(mask, Tensor) or mask.keys != keys else mask.mask(query.device)
    if seen.is_floating_point():
        return seen
    if seen.dim() == 2:
        seen = mask[:, None, None, -keys:].bool().expand(-1, -1, queries, -1)
        if is_causal:
            seen = seen & torch.ones(queries, keys, dtype=torch.bool, device=seen.device).tril(keys - queries)
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(seen.bool().to(query.device), zero, torch.finfo(query.dtype).min)
