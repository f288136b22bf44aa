"""The attention as a layer, so that `kernels` can load it by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .forward import attention_forward


class FlashAttention(nn.Module):
    """Computes :func:`attention_forward` of a module: ``FlashAttention.forward(module, query, key, value, ...)``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return attention_forward(self, query, key, value, attention_mask, dropout, **kwargs)
