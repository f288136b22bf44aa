"""Draws arguments of delta rules: gates, betas and keys as models have them, and at their limits."""

import torch
from torch import Tensor


def draw(
    seed: int,
    shape: tuple[int, int, int, int, int, int],
    by_channel: bool,
    gates: str = "small",
    betas: str = "any",
    keys: str = "any",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Draw q, k, v, g and beta on the CPU; all but g, which is float32, have the dtype.

    Args:
        shape: B, T, heads of q and k, heads of v, K, V.
        gates: ``none``, ``small``, down to -1, or ``large``, down to -300 for some tokens.
        betas: ``any`` between 0 and 1, ``zero``, ``one``, ``two``, or ``mixed`` of these three.
        keys: ``any``, ``equal`` for all tokens, or ``near`` to that.
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
