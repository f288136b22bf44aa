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


def draw(
    seed: int,
    shape: tuple[int, int, int, int, int, int],
    by_channel: bool,
    gates: str = "small",
    betas: str = "any",
    keys: str = "any",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Draw q, k, v, g and beta on the CPU.

    Args:
        seed: of the generator.
        shape: B, T, heads of q and k, heads of v, K, V.
        by_channel: whether every channel has a gate.
        gates: ``none``, ``small``, down to -1, or ``large``, down to -300 for some tokens.
        betas: ``any`` between 0 and 1, ``zero``, ``one``, ``two``, or ``mixed`` of these three.
        keys: ``any``, ``equal`` for all tokens, or ``near`` to that.
        dtype: of all but g, which is float32.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, length, groups, heads, key, value = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    uniform = torch.rand((batch, length, heads, *[key] * by_channel), generator=generator)
    g = -{"none": 0 * uniform, "small": uniform, "large": 300 * uniform**6}[gates]
    choice = torch.randint(3, (batch, length, heads), generator=generator).float()
    any_beta = torch.rand(batch, length, heads, generator=generator)
    beta = {"any": any_beta, "zero": 0 * choice, "one": 0 * choice + 1, "two": 0 * choice + 2, "mixed": choice}[betas]
    k = normal(batch, length, groups, key)
    if keys != "any":
        k = normal(batch, 1, groups, key) + (0.05 * k if keys == "near" else 0 * k)
    q, v = normal(batch, length, groups, key), normal(batch, length, heads, value)
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype)]
