"""One function of the kernel on the machine at hand: publishing checks it before and after."""

from types import ModuleType

import torch
from torch import Tensor


def trial(kernel: ModuleType, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function of the kernel gives for ``x``, ``[3, 8]`` in float32, and what it has to give.

    Without gates, and with betas of one, a state gives back what it was told last of a key: here each key is another
    direction, so that what is told stays.
    """
    keys = torch.eye(3, 8, dtype=x.dtype, device=x.device).view(1, 3, 1, 8)
    ones = torch.ones(1, 3, 1, dtype=x.dtype, device=x.device)
    found, _ = kernel.chunk_gated_delta_rule(keys, keys, x.view(1, 3, 1, 8), 0 * ones, ones, scale=1.0)
    return found.view(3, 8), x
