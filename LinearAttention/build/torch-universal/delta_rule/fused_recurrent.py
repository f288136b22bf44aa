"""One token of each row behind a state: a step of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.l2norm import l2norm
from .tokens import DeltaRuleOptions, Tokens


def recurrent_step(tokens: Tokens, state: Tensor | None, options: DeltaRuleOptions) -> tuple[Tensor, Tensor]:
    """Compute the result of one token, and the state behind it, in float32.

    ``S' = exp(g) S``, ``S⁺ = S' + k ⊗ β (v - kᵀS')``, ``o = qᵀS⁺``: "Gated Delta Networks" (arXiv 2412.06464).

    Args:
        tokens: with T of one.
        state: ``[B * H, K, V]`` in float32; None for zeros.
        options: scale and norm.

    Returns:
        ``[B, 1, H, V]`` in the dtype of the query, and ``[B * H, K, V]`` in float32.
    """
    batch, _, heads, size = tokens.value.shape
    groups = heads // tokens.key.shape[2]
    query, key = (
        _flatten_token(x if groups == 1 else x.repeat_interleave(groups, 2)) for x in (tokens.query, tokens.key)
    )
    if options.use_qk_l2norm:
        query, key = l2norm(query, options.scale), l2norm(key, 1.0)
    else:
        query = query * options.scale
    value, beta, decay = (_flatten_token(x) for x in (tokens.value, tokens.beta.unsqueeze(-1), tokens.g))
    decay = decay.exp()
    if state is None:
        state = value.new_zeros(batch * heads, key.shape[-1], size)
    state = state * decay.transpose(-1, -2)
    delta = torch.baddbmm(value, key, state, alpha=-1) * beta
    state = torch.addcmul(state, key.transpose(-1, -2), delta)
    return torch.bmm(query, state).view(batch, 1, heads, size).to(tokens.query.dtype), state


def _flatten_token(x: Tensor) -> Tensor:
    """Return ``[B, 1, H, D]`` as ``[B * H, 1, D]`` in float32."""
    return x.transpose(1, 2).flatten(0, 1).float().contiguous()
