"""The gated delta rule as a recurrence of one step a token, in the dtype that it is given: float64 where it is a truth.

``S⁺ = e^g S + k ⊗ β (v - kᵀ e^g S)`` and ``o = qᵀS⁺``: "Gated Delta Networks" (arXiv 2412.06464), equation 10; with a
gate for every channel "Kimi Linear" (arXiv 2510.26692), equation 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute the results ``[B, T, H, V]`` and the last state ``[B, H, K, V]``; q and k may have fewer heads than v."""
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    if normalised:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    results = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        change = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        results.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(results, 1), state
