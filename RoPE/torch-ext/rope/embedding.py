"""Layers that make cos and sin of positions, in place of the rotary embeddings of transformers.

The layers read ``inv_freq``, ``[F]``, and the factor ``attention_scaling`` of the module whose forward they take, in
every forward, and let transformers' own functions choose frequencies that follow the length. x, of any shape, gives the
dtype and the device, positions are ``[B, S]``, cos and sin ``[B, S, 2F]``.

An angle that is needed twice comes twice out of the product, as a broadcast, so that nothing is concatenated, and cos
and sin are halves of one tensor, so that one scale and one cast serve both. Values are those of the original to the
bit: products, cos, sin and scale in float32, each rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import is_transformed
from .frequencies import frequencies_of, scale_of
from .layer import Layer, Pair
from .one_token import note_made


class RotaryEmbedding(Layer):
    """Makes cos and sin of ``[θ0, θ1, ..., θ0, θ1, ...]``, as Llama does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _made(self, x, position_ids, x.dtype)


class RotaryEmbeddingFloat32(Layer):
    """Makes cos and sin of ``[θ0, θ1, ..., θ0, θ1, ...]`` in float32 whatever x is, as Olmo does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _made(self, x, position_ids, torch.float32)


class RotaryEmbeddingByType(Layer):
    """Makes what :class:`RotaryEmbedding` does of the frequencies of a type of layer, as Gemma 3 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Pair:
        return _made(self, x, position_ids, x.dtype, layer_type=layer_type)


class RotaryEmbeddingByTypeFloat32(Layer):
    """Makes what :class:`RotaryEmbeddingByType` does in float32 whatever x is, as Olmo 3 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Pair:
        return _made(self, x, position_ids, torch.float32, layer_type=layer_type)


class RotaryEmbeddingOfAnyType(Layer):
    """Makes what :class:`RotaryEmbedding` does, and takes a type of layer that it does not use, as ESM does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        return _made(self, x, position_ids, x.dtype)


class RotaryEmbeddingLearned(Layer):
    """Makes what :class:`RotaryEmbedding` does of frequencies times ``exp(alpha)``, as Mistral Large 4 does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _made(self, x, position_ids, x.dtype, _twice_learned)


class RotaryEmbeddingTrained(Layer):
    """Makes what :class:`RotaryEmbeddingLearned` does, with alpha's gradient, as transformers has it from 5.24 on."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _made(self, x, position_ids, x.dtype, _twice_learned, trains=True)


class RotaryEmbeddingInterleaved(Layer):
    """Makes cos and sin of ``[θ0, θ0, θ1, θ1, ...]``, as Cohere does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _made(self, x, position_ids, x.dtype, _each_twice)


class RotaryEmbeddingHalfWidth(Layer):
    """Makes cos and sin of each angle once, ``[B, S, F]``, as gpt-oss does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _made(self, x, position_ids, x.dtype, _once)


class RotaryEmbeddingHalfWidthByType(Layer):
    """Makes what :class:`RotaryEmbeddingHalfWidth` does of a type of layer's frequencies, as DeepSeek-V4 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        return _made(self, x, position_ids, x.dtype, _once, layer_type)


def _twice(module: nn.Module, frequencies: Tensor) -> Tensor:
    return frequencies.expand(2, -1)


def _twice_learned(module: nn.Module, frequencies: Tensor) -> Tensor:
    return (frequencies * module.alpha.to(device=frequencies.device, dtype=torch.float).exp()).expand(2, -1)


def _each_twice(module: nn.Module, frequencies: Tensor) -> Tensor:
    return frequencies[:, None].expand(-1, 2)


def _once(module: nn.Module, frequencies: Tensor) -> Tensor:
    return frequencies[None]


def _made(
    module: nn.Module,
    x: Tensor,
    position_ids: Tensor,
    dtype: torch.dtype,
    spread: Callable[[nn.Module, Tensor], Tensor] = _twice,
    layer_type: str | None = None,
    trains: bool = False,
) -> Pair:
    """Compute cos and sin, ``[..., M * N]``, of positions ``[...]`` times frequencies that are spread to ``[M, N]``."""
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        frequencies = spread(module, frequencies_of(module, x, position_ids, layer_type))
        angles = position_ids[..., None, None].float() * frequencies
        cos, sin = tables(angles, scale_of(module, layer_type), dtype)
        cos, sin = cos.flatten(-2), sin.flatten(-2)
        if spread is not _each_twice and position_ids.shape[-1] == 1:
            note_made(cos, sin, times=1 if spread is _once else 2)
        return cos, sin


def tables(angles: Tensor, scale: float, dtype: torch.dtype) -> Pair:
    """Compute cos and sin of angles, times a scale."""
    if is_transformed() or angles.requires_grad:  # torch.func and autograd write to no tensor that they are given
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    with unseen_by_checkpoints():
        both = angles.new_empty((2, *angles.shape))
        torch.cos(angles, out=both[0])
        torch.sin(angles, out=both[1])
        if not isinstance(scale, (float, int)) or scale != 1:
            both.mul_(scale)
        both = both.to(dtype)
    return both[0], both[1]
