"""Layers that make cos and sin of positions of several dimensions, in place of the rotary embeddings of transformers.

Which angle goes where is the module's own method, ``recomposition_frequencies``. It only chooses, so that it is asked
once, of the angles, where transformers asks it of cos and of sin: values are those of the original to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .embedding import cos_sin_tables
from .frequencies import attention_scaling, inv_freq_for
from .layer import Layer, Pair


class RotaryEmbeddingComposed(Layer):
    """Makes cos and sin of positions of time, height and width, ``[3, B, S]`` or ``[B, S]``, as Qwen3-VL does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _mrope_cos_sin(self, x, position_ids.expand(3, -1, -1), x.dtype)


class RotaryEmbeddingComposedFloat32(Layer):
    """Makes what :class:`RotaryEmbeddingComposed` does in float32 whatever x is, as Ernie 4.5 VL does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _mrope_cos_sin(self, x, position_ids.expand(3, -1, -1), torch.float32)


class RotaryEmbeddingComposedBySections(Layer):
    """Makes what :class:`RotaryEmbeddingComposed` does of a dimension for each section, as HunYuan-VL does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _mrope_cos_sin(self, x, position_ids.expand(len(self.mrope_section), -1, -1), x.dtype)


class RotaryEmbeddingComposedByType(Layer):
    """Makes what :class:`RotaryEmbeddingComposed` does of a type of layer's frequencies and sections."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        return _mrope_cos_sin(self, x, position_ids.expand(3, -1, -1), x.dtype, layer_type, (layer_type,))


class RotaryEmbeddingOfRowsByType(Layer):
    """Makes cos and sin of rows and columns, ``[2, B, S]`` or ``[B, S]``, of a type of layer's frequencies."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        return _mrope_cos_sin(self, x, position_ids.expand(2, -1, -1), x.dtype, layer_type)


class RotaryEmbeddingOfPatches(Layer):
    """Makes cos and sin of the rows and columns of patches, ``[T, 2]``, as Pixtral does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _mrope_cos_sin(self, x, position_ids, x.dtype)


class RotaryEmbeddingOfPatchesFloat32(Layer):
    """Makes what :class:`RotaryEmbeddingOfPatches` does in float32 whatever x is, as Qwen2-VL's tower does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _mrope_cos_sin(self, x, position_ids, torch.float32)


def _mrope_cos_sin(
    module: nn.Module,
    x: Tensor,
    position_ids: Tensor,
    dtype: torch.dtype,
    layer_type: str | None = None,
    arguments: tuple[str | None, ...] = (),
) -> Pair:
    with torch.no_grad():
        frequencies = inv_freq_for(module, x, position_ids, layer_type)
        angles = module.recomposition_frequencies(position_ids[..., None].float() * frequencies, *arguments)
        return cos_sin_tables(angles, attention_scaling(module, layer_type), dtype)
