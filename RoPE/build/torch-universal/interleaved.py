"""Layers that rotate pairs of neighbours in a head, each named after a model that writes it so."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.modules import Layer
from .one_token import Pair
from .rotate_qk import rotate_qk
from .rotation import check, check_complex, each_twice, first_half, rotate, rotate_complex, rotate_part


class RotaryPosEmbInterleaved(Layer):
    """Rotates by cos and sin that hold each angle twice in a row, as BLT does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        return rotate_qk(q, k, cos, sin, unsqueeze_dim, interleaved=True)


class RotaryPosEmbInterleavedFloat32(Layer):
    """Rotates as :class:`RotaryPosEmbInterleaved` in float32, and gives both in the dtype of q, as Cohere does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin, True, True).to(q.dtype), rotate(k, cos, sin, True, True).to(q.dtype)


class RotaryPosEmbInterleavedPartial(Layer):
    """Rotates as much of a head as cos is wide, as GLM-4V does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, partial=True, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate_part(q, cos, sin, True), rotate_part(k, cos, sin, True)


class RotaryPosEmbInterleavedRepeated(Layer):
    """Rotates by the angles in the first half of cos and sin, as Helium does; the second half is not used."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _repeated(cos, unsqueeze_dim), _repeated(sin, unsqueeze_dim)
        return rotate(q, cos, sin, True), rotate(k, cos, sin, True)


class RotaryPosEmbInterleavedRepeatedFloat32(Layer):
    """Rotates as :class:`RotaryPosEmbInterleavedRepeated` in float32, and gives the dtype of q, as ERNIE 4.5 does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _repeated(cos, unsqueeze_dim), _repeated(sin, unsqueeze_dim)
        return rotate(q, cos, sin, True, True).to(q.dtype), rotate(k, cos, sin, True, True).to(q.dtype)


class RotaryPosEmbInterleavedRepeatedPartial(Layer):
    """Rotates as :class:`RotaryPosEmbInterleavedRepeated` as much of a head as cos is wide, as GLM-4 does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, partial=True, q=q, k=k)
        cos, sin = _repeated(cos, unsqueeze_dim), _repeated(sin, unsqueeze_dim)
        return rotate_part(q, cos, sin, True), rotate_part(k, cos, sin, True)


class RotaryPosEmbInterleavedHalfWidth(Layer):
    """Rotates by cos and sin that hold each angle once, ``[B, S, D/2]``, as OpenAI's privacy filter does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, times=2, q=q, k=k)
        cos, sin = each_twice(cos).unsqueeze(unsqueeze_dim), each_twice(sin).unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin, True), rotate(k, cos, sin, True)


class RotaryPosEmbInterleavedTail(Layer):
    """Rotates the last values of a head, twice as many as cos is wide, in float32, as DeepSeek V4 does."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        check(cos, sin, times=2, partial=True, x=x)
        cos, sin = each_twice(cos).unsqueeze(unsqueeze_dim), each_twice(sin).unsqueeze(unsqueeze_dim)
        width = cos.shape[-1]
        if width == x.shape[-1]:
            return rotate(x, cos, sin, True, True).to(x.dtype)
        rest, part = x.split((x.shape[-1] - width, width), -1)
        return torch.cat((rest, rotate(part, cos, sin, True, True).to(x.dtype)), -1)


class RotaryPosEmbEveryTwo(Layer):
    """Rotates one tensor ``[B, S, N, D]`` by ``[B, S, D/2]``, and takes sin before cos, as GPT-J does."""

    def forward(self, tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        check(cos, sin, times=2, tensor=tensor)
        return rotate(tensor, each_twice(cos)[:, :, None, :], each_twice(sin)[:, :, None, :], True)


class RotaryPosEmbPairwise(Layer):
    """Rotates in float32 by cos and sin that broadcast as they are, and keeps both dtypes, as SAM 3 does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        check(cos, sin, q=q, k=k)
        return rotate(q, cos, sin, True, True).to(q.dtype), rotate(k, cos, sin, True, True).to(k.dtype)


class VisionRotaryPosEmbPairwise(Layer):
    """Rotates ``[..., S, N, D]`` by ``[S, D]`` in float32, and keeps both dtypes, as Inkling 2's tower does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
        return rotate(q, cos, sin, True, True).to(q.dtype), rotate(k, cos, sin, True, True).to(k.dtype)


class RotaryEmbComplex(Layer):
    """Multiplies ``[B, N, S, D]`` with complex ``[B, S, D/2]`` in float32, keeping dtypes, as DeepSeek V2 does."""

    def forward(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
        check_complex(freqs_cis, "freqs_cis", xq=xq, xk=xk)
        return rotate_complex((xq, xk), freqs_cis.unsqueeze(1).to(xq.device))


class RotaryEmbComplexBySequence(Layer):
    """Multiplies ``[B, S, N, D]`` with complex ``[B, S, D/2]``, as Llama 4 does."""

    def forward(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
        check_complex(freqs_cis, "freqs_cis", xq=xq, xk=xk)
        return rotate_complex((xq, xk), freqs_cis[:, :, None, :])


class VisionRotaryEmbComplex(Layer):
    """Multiplies with complex numbers of each patch, ``[S, ..., D/2]``, as the vision tower of Llama 4 does."""

    def forward(self, query: Tensor, key: Tensor, freqs_ci: Tensor) -> Pair:
        check_complex(freqs_ci, "freqs_ci", query=query, key=key)
        shape = [1] * query.dim()
        shape[1], shape[-1] = query.shape[1], query.shape[-1] // 2
        return rotate_complex((query, key), freqs_ci.view(shape).to(query.device))


class RotaryPosEmbDeinterleaved(Layer):
    """Takes pairs of neighbours and gives halves, as DeepSeek V3 does. The first half of cos holds the angles."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _in_halves(cos, unsqueeze_dim), _in_halves(sin, unsqueeze_dim)
        return rotate(_deinterleaved(q), cos, sin), rotate(_deinterleaved(k), cos, sin)


class RotaryPosEmbDeinterleavedOptionalKey(Layer):
    """Rotates as :class:`RotaryPosEmbDeinterleaved`, and gives None for k if there is none, as Mistral Large 4 does."""

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _in_halves(cos, unsqueeze_dim), _in_halves(sin, unsqueeze_dim)
        k_rotated = None if k is None else rotate(_deinterleaved(k), cos, sin)
        return rotate(_deinterleaved(q), cos, sin), k_rotated  # type: ignore[return-value]


def _repeated(table: Tensor, unsqueeze_dim: int) -> Tensor:
    """Repeat each value of the first half of cos or sin in a row, and give it a dimension for the heads."""
    return each_twice(first_half(table)).unsqueeze(unsqueeze_dim)


def _in_halves(table: Tensor, unsqueeze_dim: int) -> Tensor:
    """Repeat the first half of cos or sin as a whole, and give it a dimension for the heads."""
    half = first_half(table).unsqueeze(unsqueeze_dim)
    return torch.cat((half, half), -1)


def _deinterleaved(x: Tensor) -> Tensor:
    """Copy pairs of neighbours into halves: ``[x0, x2, ..., x1, x3, ...]``."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)
