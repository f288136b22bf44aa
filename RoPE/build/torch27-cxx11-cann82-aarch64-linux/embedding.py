"""Layers that make cos and sin of positions, in place of the rotary embeddings of transformers.

The layers read ``inv_freq`` of the module whose forward they take, ``[F]``, and leave its factor ``attention_scaling``
out: it has to be 1. x, of any shape, gives the dtype and the device, positions are ``[B, S]``, cos and sin
``[B, S, 2F]``.

An angle that is needed twice comes twice out of the product, as a broadcast, so that nothing is concatenated, and cos
and sin are halves of one tensor, so that one cast serves both. Values are those of the original to the bit: products,
cos and sin in float32, each rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layer import Layer, Pair
from .transforms import is_transformed


class RotaryEmbedding(Layer):
    """Makes cos and sin of ``[θ0, θ1, ..., θ0, θ1, ...]``, as Llama does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _tables(position_ids, _frequencies(self, x).expand(2, -1), x.dtype)


class RotaryEmbeddingFloat32(Layer):
    """Makes cos and sin of ``[θ0, θ1, ..., θ0, θ1, ...]`` in float32 whatever x is, as Olmo does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _tables(position_ids, _frequencies(self, x).expand(2, -1), torch.float32)


class RotaryEmbeddingByType(Layer):
    """Makes what :class:`RotaryEmbedding` does of the frequencies of a type of layer, as Gemma 3 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Pair:
        return _tables(position_ids, _frequencies(self, x, f"{layer_type}_").expand(2, -1), x.dtype)


class RotaryEmbeddingByTypeFloat32(Layer):
    """Makes what :class:`RotaryEmbeddingByType` does in float32 whatever x is, as Olmo 3 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Pair:
        return _tables(position_ids, _frequencies(self, x, f"{layer_type}_").expand(2, -1), torch.float32)


class RotaryEmbeddingInterleaved(Layer):
    """Makes cos and sin of ``[θ0, θ0, θ1, θ1, ...]``, as Cohere does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _tables(position_ids, _frequencies(self, x)[:, None].expand(-1, 2), x.dtype)


class RotaryEmbeddingHalfWidth(Layer):
    """Makes cos and sin of each angle once, ``[B, S, F]``, as gpt-oss does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _tables(position_ids, _frequencies(self, x)[None], x.dtype)


def _frequencies(module: nn.Module, x: Tensor, prefix: str = "") -> Tensor:
    """Return the frequencies of a module, ``[F]``, in float32 on the device of x."""
    return getattr(module, f"{prefix}inv_freq").to(device=x.device, dtype=torch.float)


def _tables(position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Pair:
    """Compute cos and sin, ``[..., M * N]``, of positions ``[...]`` times frequencies ``[M, N]``, without gradients."""
    with torch.no_grad():
        angles = position_ids[..., None, None].float() * frequencies
        if is_transformed():  # torch.func writes to no tensor that it is given
            return angles.cos().flatten(-2).to(dtype), angles.sin().flatten(-2).to(dtype)
        tables = angles.new_empty((2, *angles.shape))
        torch.cos(angles, out=tables[0])
        torch.sin(angles, out=tables[1])
        tables = tables.flatten(-2).to(dtype)
        return tables[0], tables[1]
