"""What all layers share: `kernels` allows no members beyond these two."""

from __future__ import annotations

from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """What all layers say of themselves to `kernels`."""

    can_torch_compile = True
    has_backward = True
