"""What an activation computes, told by its values: many classes have one formula."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def has_values(activation: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
    """Compare an activation with a function, on the host. One with parameters of its own is another function."""
    if any(True for _ in (*activation.parameters(), *activation.buffers())):
        return False
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        grid = torch.linspace(-9, 9, 181, device="cpu")
        try:
            values = activation.forward(grid.clone())  # not its hooks
        except Exception:  # it wants something else than one tensor on the CPU
            return False
        # float32 leaves 1e-6 between two ways to compute one formula; GELU and its form with tanh are 4e-4 apart
        return isinstance(values, Tensor) and torch.allclose(values, function(grid), rtol=0, atol=1e-5)
