"""What all layers of this package share."""

from __future__ import annotations

from torch import nn


class Layer(nn.Module):
    """Says of all layers what `kernels` wants to know of them; it allows no members beyond these two."""

    can_torch_compile = True
    has_backward = True
