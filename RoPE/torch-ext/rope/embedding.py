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
from ._common.modules import Layer
from .one_token import Pair, note_cos_sin


class RotaryEmbedding(Layer):
    """Makes cos and sin of ``[θ0, θ1, ..., θ0, θ1, ...]``, as Llama does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype)


class RotaryEmbeddingFloat32(Layer):
    """Makes cos and sin of ``[θ0, θ1, ..., θ0, θ1, ...]`` in float32 whatever x is, as Olmo does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, torch.float32)


class RotaryEmbeddingByType(Layer):
    """Makes what :class:`RotaryEmbedding` does of the frequencies of a type of layer, as Gemma 3 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype, layer_type=layer_type)


class RotaryEmbeddingByTypeFloat32(Layer):
    """Makes what :class:`RotaryEmbeddingByType` does in float32 whatever x is, as Olmo 3 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Pair:
        return _cos_sin(self, x, position_ids, torch.float32, layer_type=layer_type)


class RotaryEmbeddingOfAnyType(Layer):
    """Makes what :class:`RotaryEmbedding` does, and takes a type of layer that it does not use, as ESM does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype)


class RotaryEmbeddingLearned(Layer):
    """Makes what :class:`RotaryEmbedding` does of frequencies times ``exp(alpha)``, as Mistral Large 4 does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype, _twice_learned)


class RotaryEmbeddingTrained(Layer):
    """Makes what :class:`RotaryEmbeddingLearned` does, with alpha's gradient, as transformers has it from 5.24 on."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype, _twice_learned, trains=True)


class RotaryEmbeddingInterleaved(Layer):
    """Makes cos and sin of ``[θ0, θ0, θ1, θ1, ...]``, as Cohere does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype, _each_twice)


class RotaryEmbeddingHalfWidth(Layer):
    """Makes cos and sin of each angle once, ``[B, S, F]``, as gpt-oss does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype, _once)


class RotaryEmbeddingHalfWidthByType(Layer):
    """Makes what :class:`RotaryEmbeddingHalfWidth` does of a type of layer's frequencies, as DeepSeek-V4 does."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype, _once, layer_type)


class RotaryEmbeddingComposed(Layer):
    """Makes cos and sin of positions of time, height and width, ``[3, B, S]`` or ``[B, S]``, as Qwen3-VL does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids.expand(3, -1, -1), x.dtype, _composed)


class RotaryEmbeddingComposedFloat32(Layer):
    """Makes what :class:`RotaryEmbeddingComposed` does in float32 whatever x is, as Ernie 4.5 VL does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids.expand(3, -1, -1), torch.float32, _composed)


class RotaryEmbeddingComposedBySections(Layer):
    """Makes what :class:`RotaryEmbeddingComposed` does of a dimension for each section, as HunYuan-VL does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids.expand(len(self.mrope_section), -1, -1), x.dtype, _composed)


class RotaryEmbeddingComposedByType(Layer):
    """Makes what :class:`RotaryEmbeddingComposed` does of a type of layer's frequencies and sections."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        position_ids = position_ids.expand(3, -1, -1)
        return _cos_sin(self, x, position_ids, x.dtype, lambda *given: _composed(*given, layer_type), layer_type)


class RotaryEmbeddingOfRowsByType(Layer):
    """Makes cos and sin of rows and columns, ``[2, B, S]`` or ``[B, S]``, of a type of layer's frequencies."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Pair:
        return _cos_sin(self, x, position_ids.expand(2, -1, -1), x.dtype, _composed, layer_type)


class RotaryEmbeddingOfPatches(Layer):
    """Makes cos and sin of the rows and columns of patches, ``[T, 2]``, as Pixtral does, in the dtype of x."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, x.dtype, _composed)


class RotaryEmbeddingOfPatchesFloat32(Layer):
    """Makes what :class:`RotaryEmbeddingOfPatches` does in float32 whatever x is, as Qwen2-VL's tower does."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Pair:
        return _cos_sin(self, x, position_ids, torch.float32, _composed)


def _twice(module: nn.Module, positions: Tensor, frequencies: Tensor) -> Tensor:
    return (positions[..., None, None] * frequencies.expand(2, -1)).flatten(-2)


def _twice_learned(module: nn.Module, positions: Tensor, frequencies: Tensor) -> Tensor:
    factors = module.alpha.to(device=frequencies.device, dtype=torch.float).exp()
    return _twice(module, positions, frequencies * factors)


def _each_twice(module: nn.Module, positions: Tensor, frequencies: Tensor) -> Tensor:
    return (positions[..., None, None] * frequencies[:, None].expand(-1, 2)).flatten(-2)


def _once(module: nn.Module, positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions[..., None] * frequencies


def _composed(module: nn.Module, positions: Tensor, frequencies: Tensor, *layer_type: str | None) -> Tensor:
    """Compute angles of positions of several dimensions.

    Which goes where is the module's own method, ``recomposition_frequencies``. It only chooses, so that it is asked
    once, of the angles, where transformers asks it of cos and of sin.
    """
    return module.recomposition_frequencies(positions[..., None] * frequencies, *layer_type)


def _cos_sin(
    module: nn.Module,
    x: Tensor,
    position_ids: Tensor,
    dtype: torch.dtype,
    angles: Callable[[nn.Module, Tensor, Tensor], Tensor] = _twice,
    layer_type: str | None = None,
    trains: bool = False,
) -> Pair:
    """Compute cos and sin of the angles that positions and frequencies make."""
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        frequencies = _inv_freq(module, x, position_ids, layer_type)
        made = angles(module, position_ids.float(), frequencies)
        cos, sin = _cos_sin_tables(made, _attention_scaling(module, layer_type), dtype)
        if angles in (_twice, _twice_learned, _once) and position_ids.shape[-1] == 1:
            note_cos_sin(cos, sin, times=1 if angles is _once else 2)
        return cos, sin


def _cos_sin_tables(angles: Tensor, scale: float, dtype: torch.dtype) -> Pair:
    """Compute cos and sin of angles, times a scale."""
    if is_transformed() or angles.requires_grad:  # torch.func and autograd write to no tensor that they are given
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    with unseen_by_checkpoints():
        rows = angles.shape[0]
        both = angles.new_empty((2 * rows, *angles.shape[1:]))
        torch.cos(angles, out=both[:rows])
        torch.sin(angles, out=both[rows:])
        if not isinstance(scale, (float, int)) or scale != 1:
            both.mul_(scale)
        both = both.to(dtype)
    return both.unsafe_chunk(2)  # no views, to which nothing could be written that has a gradient


def _inv_freq(module: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Tensor:
    """Return the frequencies for positions, ``[F]``, in float32 on the device of x.

    Those of the rope types dynamic and longrope follow the length: transformers' decorator of the forward that a layer
    takes the place of, ``dynamic_rope_update`` of modeling_rope_utils.py, brings them up to date.
    """
    rope_type = getattr(module, "rope_type", "default")
    if layer_type is not None and isinstance(rope_type, dict):
        rope_type = rope_type[layer_type]
    if isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope"):
        kind = "longrope" if rope_type == "longrope" else "dynamic"
        options = {} if layer_type is None else {"layer_type": layer_type}
        _frequency_update(type(module), kind)(module, position_ids, device=x.device, **options)
    return getattr(module, f"{_prefix(layer_type)}inv_freq").to(device=x.device, dtype=torch.float)


def _attention_scaling(module: nn.Module, layer_type: str | None = None) -> float:
    """Return the factor of cos and sin, which may follow the length."""
    return getattr(module, f"{_prefix(layer_type)}attention_scaling")


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _frequency_update(cls: type[nn.Module], kind: str):
    """Return the function inside of the decorator of a class's forward that changes its frequencies."""
    name, decorated = f"{kind}_frequency_update", cls.forward
    while name not in decorated.__code__.co_freevars:
        decorated = decorated.__wrapped__  # below torch.no_grad, under which it is up to transformers 5.23
    return decorated.__closure__[decorated.__code__.co_freevars.index(name)].cell_contents
