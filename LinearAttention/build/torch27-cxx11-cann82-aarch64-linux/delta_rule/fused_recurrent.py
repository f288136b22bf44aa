"""One token of each row after a state: a step of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.l2norm import unit
from .chunk import RuleOptions, Tokens


def step(tokens: Tokens, state: Tensor | None, options: RuleOptions) -> tuple[Tensor, Tensor]:
    """Compute the result of one token, and the state behind it, in float32.

    ``S' = exp(g) S``, ``S⁺ = S' + k ⊗ β (v - kᵀS')``, ``o = qᵀS⁺``.

    Args:
        tokens: with T of one.
        state: ``[B * H, K, V]`` in float32; None for zeros.
        options: scale and norm.

    Returns:
        ``[B, 1, H, V]`` in the dtype of the query, and ``[B * H, K, V]`` in float32.
    """
    batch, _, heads, size = tokens.value.shape
    groups = heads // tokens.key.shape[2]
    query, key = (_row(x if groups == 1 else x.repeat_interleave(groups, 2)) for x in (tokens.query, tokens.key))
    if options.normalised:
        query, key = unit(query, options.scale), unit(key, 1.0)
    else:
        query = query * options.scale
    value, beta, decay = _row(tokens.value), _row(tokens.beta.unsqueeze(-1)), _row(tokens.g).exp()
    if state is None:
        state = value.new_zeros(batch * heads, key.shape[-1], size)
    state = state * decay.transpose(-1, -2)
    change = torch.baddbmm(value, key, state, alpha=-1) * beta
    state = torch.addcmul(state, key.transpose(-1, -2), change)
    return torch.bmm(query, state).view(batch, 1, heads, size).to(tokens.query.dtype), state


def _row(x: Tensor) -> Tensor:
    """Return ``[B, 1, H, D]`` as ``[B * H, 1, D]`` in float32."""
    return x.transpose(1, 2).flatten(0, 1).float().contiguous()
