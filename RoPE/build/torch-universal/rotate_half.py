"""Layers that rotate the first half of a head against the second, each named after a model that writes it so."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.derivatives import is_transformed
from ._common.modules import Layer
from .functional import apply_multimodal_rotary_pos_emb, apply_rotary_pos_emb
from .one_token import Pair, rotate_one_token
from .rotate_qk import rotate_qk
from .rotation import check, rotate, rotate_part


class RotaryPosEmb(Layer):
    """Computes ``x * cos + rotate_half(x) * sin`` in the dtype that x and cos promote to, as Llama does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        return rotate_qk(q, k, cos, sin, unsqueeze_dim)


class RotaryPosEmbCastBack(Layer):
    """Rotates, and gives q and k in their own dtypes, as Olmo 2 does, whose cos and sin are float32."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        q_rotated, k_rotated = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        return q_rotated.to(q.dtype), k_rotated.to(k.dtype)


class RotaryPosEmbFloat32(Layer):
    """Rotates in float32, and gives both in the dtype of q, as ModernBERT does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin, float32=True).to(q.dtype), rotate(k, cos, sin, float32=True).to(q.dtype)


class RotaryPosEmbTablesInFloat32(Layer):
    """Rotates as :class:`RotaryPosEmbFloat32`, and casts float64 cos and sin to float32, as HunYuan-VL does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = (_at_most_float32(table.unsqueeze(unsqueeze_dim)) for table in (cos, sin))
        return rotate(q, cos, sin, float32=True).to(q.dtype), rotate(k, cos, sin, float32=True).to(q.dtype)


class RotaryPosEmbReversed(Layer):
    """Rotates by the negative angle, as NanoChat does, whose ``rotate_half`` is ``[x2, -x1]``."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        return apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)


class RotaryPosEmbHalfWidth(Layer):
    """Rotates by cos and sin that hold each angle once, ``[B, S, D/2]``, as gpt-oss does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, times=2, q=q, k=k)
        if cos.shape[-2:-1] == (1,) and not torch.compiler.is_compiling() and not is_transformed():
            together = rotate_one_token(q, k, cos, sin, unsqueeze_dim)
            if together is not None:
                return together
        return apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim)


class RotaryPosEmbPartial(Layer):
    """Rotates as much of a head as cos is wide, as GPT-NeoX and Phi-3 do."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, partial=True, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate_part(q, cos, sin), rotate_part(k, cos, sin)


class RotaryPosEmbPartialPositions(Layer):
    """Rotates as :class:`RotaryPosEmbPartial`, and takes ``position_ids`` without using it, as GLM-ASR does."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> Pair:
        check(cos, sin, partial=True, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate_part(q, cos, sin), rotate_part(k, cos, sin)


class RotaryPosEmbPartialOptionalKey(Layer):
    """Rotates as :class:`RotaryPosEmbPartial`, and q alone if there is no k, as Qwen4-Exp does."""

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        cos: Tensor = None,  # type: ignore[assignment]  # as transformers declares them
        sin: Tensor = None,  # type: ignore[assignment]
        unsqueeze_dim: int = 1,
    ) -> Tensor | Pair:
        check(cos, sin, partial=True, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        rotated = rotate_part(q, cos, sin)
        return rotated if k is None else (rotated, rotate_part(k, cos, sin))


class RotaryPosEmbLastQueries(Layer):
    """Rotates q that has the last of the positions of k and cos, as Muse Glimmer's assistant does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        last = q.size(-2)
        return rotate(q, cos[..., -last:, :], sin[..., -last:, :]), rotate(k, cos, sin)


class RotaryPosEmbPatches(Layer):
    """Rotates the last positions, as many as cos has, and passes those before through, as DINOv3 does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs) -> Pair:
        check(cos, sin, q=q, k=k)
        prefix = q.shape[-2] - sin.shape[-2]
        if prefix < 0 or k.shape[-2] != q.shape[-2]:
            raise ValueError(
                f"q {list(q.shape)} and k {list(k.shape)} must have equally many positions, and at least as many as "
                f"cos {list(cos.shape)}"
            )
        if prefix == 0:
            return rotate(q, cos, sin), rotate(k, cos, sin)
        (q_first, q_rest), (k_first, k_rest) = (x.split((prefix, sin.shape[-2]), -2) for x in (q, k))
        return torch.cat((q_first, rotate(q_rest, cos, sin)), -2), torch.cat((k_first, rotate(k_rest, cos, sin)), -2)


class RotaryPosEmbSingle(Layer):
    """Rotates one tensor, as Gemma 4 does."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        check(cos, sin, x=x)
        return rotate(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


class VisionRotaryPosEmb(Layer):
    """Rotates ``[S, N, D]`` by ``[S, D]`` in float32, and gives q and k in their own dtypes, as Qwen2-VL does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _at_most_float32(cos.unsqueeze(-2)), _at_most_float32(sin.unsqueeze(-2))
        return rotate(q, cos, sin, float32=True).to(q.dtype), rotate(k, cos, sin, float32=True).to(k.dtype)


class VisionRotaryPosEmbPartial(Layer):
    """Rotates ``[S, N, D]`` or ``[B, S, N, D]`` by ``[S, R]``, as much of a head as cos is wide, as MiniMax-M3-VL."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        check(cos, sin, partial=True, q=q, k=k)
        if cos.dim() != 2:  # of which the functions make another layout of heads
            raise ValueError(f"cos {list(cos.shape)} must have two dimensions")
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return rotate_part(q, cos, sin), rotate_part(k, cos, sin)


class MultimodalRotaryPosEmb(Layer):
    """Rotates by cos and sin of time, height and width, ``[3, B, S, D]``, as Qwen2-VL did in earlier releases."""

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
    ) -> Pair:
        return apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim)


def _at_most_float32(table: Tensor) -> Tensor:
    """Cast cos or sin from float64 to float32, and leave other dtypes."""
    return table.float() if table.dtype == torch.float64 else table
