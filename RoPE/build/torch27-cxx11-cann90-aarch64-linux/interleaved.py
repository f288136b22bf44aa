"""Layers that rotate pairs of neighbours in a head, each named after a model that writes it so."""

from __future__ import annotations

import torch
from torch import Tensor

from .layer import Layer, Pair
from .pairs import rotate_both
from .rotation import check, check_complex, each_twice, first_half, rotate, rotate_complex, rotate_part


class RotaryPosEmbInterleaved(Layer):
    """cos and sin hold each angle twice in a row already, as in BLT."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        return rotate_both(q, k, cos, sin, unsqueeze_dim, interleaved=True)


class RotaryPosEmbInterleavedFloat32(Layer):
    """The same in float32, and then the dtype of q, as in Cohere."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin, True, True).to(q.dtype), rotate(k, cos, sin, True, True).to(q.dtype)


class RotaryPosEmbInterleavedPartial(Layer):
    """As much of a head as cos is wide, as in GLM-4V."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, partial=True, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate_part(q, cos, sin, True), rotate_part(k, cos, sin, True)


class RotaryPosEmbInterleavedRepeated(Layer):
    """The first half of cos holds the angles, the second is not used, as in Helium."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _repeated(cos, unsqueeze_dim), _repeated(sin, unsqueeze_dim)
        return rotate(q, cos, sin, True), rotate(k, cos, sin, True)


class RotaryPosEmbInterleavedRepeatedFloat32(Layer):
    """The same in float32, and then the dtype of q, as in ERNIE 4.5."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _repeated(cos, unsqueeze_dim), _repeated(sin, unsqueeze_dim)
        return rotate(q, cos, sin, True, True).to(q.dtype), rotate(k, cos, sin, True, True).to(q.dtype)


class RotaryPosEmbInterleavedRepeatedPartial(Layer):
    """The same, of a head as much as cos is wide, as in GLM-4."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, partial=True, q=q, k=k)
        cos, sin = _repeated(cos, unsqueeze_dim), _repeated(sin, unsqueeze_dim)
        return rotate_part(q, cos, sin, True), rotate_part(k, cos, sin, True)


class RotaryPosEmbInterleavedHalfWidth(Layer):
    """cos and sin hold each angle once, as in OpenAI's privacy filter."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, times=2, q=q, k=k)
        cos, sin = each_twice(cos).unsqueeze(unsqueeze_dim), each_twice(sin).unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin, True), rotate(k, cos, sin, True)


class RotaryPosEmbInterleavedTail(Layer):
    """The last values of a head, twice as many as cos is wide, in float32, and then the dtype of x: DeepSeek V4."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        check(cos, sin, times=2, partial=True, x=x)
        cos, sin = each_twice(cos).unsqueeze(unsqueeze_dim), each_twice(sin).unsqueeze(unsqueeze_dim)
        kept = x.shape[-1] - cos.shape[-1]
        rotated = rotate(x[..., kept:], cos, sin, True, True).to(x.dtype)
        return torch.cat((x[..., :kept], rotated), -1) if kept else rotated


class RotaryPosEmbEveryTwo(Layer):
    """One tensor, ``[B, S, N, D]`` beside ``[B, S, D/2]``, and sin before cos, as in GPT-J."""

    def forward(self, tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        check(cos, sin, times=2, tensor=tensor)
        return rotate(tensor, each_twice(cos)[:, :, None, :], each_twice(sin)[:, :, None, :], True)


class RotaryPosEmbPairwise(Layer):
    """cos and sin broadcast as they are; in float32, and then the dtypes of q and k, as in SAM 3."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        check(cos, sin, q=q, k=k)
        return rotate(q, cos, sin, True, True).to(q.dtype), rotate(k, cos, sin, True, True).to(k.dtype)


class RotaryEmbComplex(Layer):
    """``[B, N, S, D]`` times complex numbers ``[B, S, D/2]``, in float32, and then the dtype of each: DeepSeek V2."""

    def forward(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
        check_complex(freqs_cis, "freqs_cis", xq=xq, xk=xk)
        return rotate_complex((xq, xk), freqs_cis.unsqueeze(1).to(xq.device))


class RotaryEmbComplexBySequence(Layer):
    """The same for ``[B, S, N, D]``, as in Llama 4."""

    def forward(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
        check_complex(freqs_cis, "freqs_cis", xq=xq, xk=xk)
        return rotate_complex((xq, xk), freqs_cis[:, :, None, :])


class VisionRotaryEmbComplex(Layer):
    """The same with one position for each patch, ``[S, ..., D/2]``, as in the vision tower of Llama 4."""

    def forward(self, query: Tensor, key: Tensor, freqs_ci: Tensor) -> Pair:
        check_complex(freqs_ci, "freqs_ci", query=query, key=key)
        shape = [1] * query.dim()
        shape[1], shape[-1] = query.shape[1], query.shape[-1] // 2
        return rotate_complex((query, key), freqs_ci.view(shape).to(query.device))


class RotaryPosEmbDeinterleaved(Layer):
    """Pairs of neighbours go in, halves come out, as in DeepSeek V3. The first half of cos holds the angles."""

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
    """The same, without k if there is none, as in Mistral Large 4."""

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        check(cos, sin, q=q, k=k)
        cos, sin = _in_halves(cos, unsqueeze_dim), _in_halves(sin, unsqueeze_dim)
        k_rotated = None if k is None else rotate(_deinterleaved(k), cos, sin)
        return rotate(_deinterleaved(q), cos, sin), k_rotated  # type: ignore[return-value]


def _repeated(table: Tensor, unsqueeze_dim: int) -> Tensor:
    return each_twice(first_half(table)).unsqueeze(unsqueeze_dim)


def _in_halves(table: Tensor, unsqueeze_dim: int) -> Tensor:
    half = first_half(table).unsqueeze(unsqueeze_dim)
    return torch.cat((half, half), -1)


def _deinterleaved(x: Tensor) -> Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)
