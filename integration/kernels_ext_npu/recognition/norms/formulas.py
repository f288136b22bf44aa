"""Norms by formula: what layers compute, exactly and as they round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Terms(NamedTuple):
    """What a norm is computed from: x and gate ``[..., H]``, weight and bias ``[H]``; None is what it does without.

    ``size`` is the number of values that are normed together, None if all of the last dimension are.
    """

    x: Tensor
    gate: Any = None
    weight: Any = None
    bias: Any = None
    size: int | None = None

    def map(self, change: Callable[[Tensor, str], Tensor]) -> Terms:
        """Return other terms, each changed by a function of it and of its name."""
        changed: dict[str, Any] = {name: change(getattr(self, name), name) for name in self.names}
        return self._replace(**changed)

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return [name for name in self._fields[:4] if getattr(self, name) is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors."""
        return [getattr(self, name) for name in self.names]


class Rounding(NamedTuple):
    """How a layer rounds in 16 bits."""

    layer: str
    compute: Callable[[Terms, Tensor], Tensor]  # of the terms and of what is normed, in float32 and without weight
    casts_back: bool = False  # what the layer gives, to the dtype of x


class Kind(NamedTuple):
    """Norms of one formula: ``scale(terms) * normed(inner(terms)) + bias``."""

    inner: Callable[[Terms], Tensor]
    scale: Callable[[Terms], Any]
    roundings: tuple[Rounding, ...]
    numbers: tuple[tuple[str, Any], ...] = ()  # what the layers read beside eps
    has_groups: bool = False  # whether they norm groups of the last dimension

    def exact(self, terms: Terms, eps: float | None) -> Tensor:
        """Compute it in the dtype of its terms."""
        result = self.scale(terms) * _normed(self.inner(terms), eps, terms.size)
        return result if terms.bias is None else result + terms.bias

    def rounded(self, rounding: Rounding, terms: Terms, eps: float | None) -> Tensor:
        """Compute it as one of its layers rounds."""
        wide = terms.map(lambda each, _: each.float())
        return rounding.compute(terms, _normed(self.inner(wide), eps, terms.size))


def _normed(x: Tensor, eps: float | None, size: int | None) -> Tensor:
    if eps is None:  # torch's own: what the dtype can tell from 1
        eps = torch.finfo(x.dtype).eps
    if size is not None:
        return _normed(x.unflatten(-1, (-1, size)), eps, None).flatten(-2)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _itself(t: Terms) -> Tensor:
    return t.x


def _centred(t: Terms) -> Tensor:
    return t.x - t.x.mean(-1, keepdim=True)


def _gated(t: Terms) -> Tensor:
    return t.x if t.gate is None else t.x * F.silu(t.gate)


def _gated_behind(name: str, activation: Callable[[Tensor], Tensor]) -> Kind:
    """Return the kind of norms with a gate behind them."""

    def rounded_between(t: Terms, n: Tensor) -> Tensor:
        return (t.weight * n.to(t.x.dtype) * activation(t.gate.float())).to(t.x.dtype)

    def rounded_once(t: Terms, n: Tensor) -> Tensor:
        return (t.weight.float() * n * activation(t.gate.float())).to(t.x.dtype)

    return Kind(
        _itself,
        lambda t: t.weight * (1.0 if t.gate is None else activation(t.gate)),
        (Rounding("RMSNormGated", rounded_between), Rounding("RMSNormGatedCastLast", rounded_once)),
        (("activation", name),),
    )


def _rounded(t: Terms, n: Tensor) -> Tensor:
    return n.to(t.x.dtype)


def _rounded_first(t: Terms, n: Tensor) -> Tensor:
    return t.weight * n.to(t.x.dtype)


def _rounded_last(t: Terms, n: Tensor) -> Tensor:
    return (t.weight.float() * n).to(t.x.dtype)


def _rounded_by_weight(t: Terms, n: Tensor) -> Tensor:
    return t.weight * (n if t.weight.dtype is torch.float32 else n.to(t.weight.dtype))


_WEIGHTED = (
    Rounding("RMSNorm", _rounded_first),
    Rounding("RMSNormCastLast", _rounded_last),
    Rounding("T5LayerNorm", _rounded_by_weight),
)
_ZERO_CENTRED = (
    Rounding("RMSNormZeroCentered", lambda t, n: ((1 + t.weight.float()) * n).to(t.x.dtype)),
    Rounding("RMSNormZeroCentered", lambda t, n: ((1 + t.weight).float() * n).to(t.x.dtype)),
)
_CENTRED = (Rounding("LayerNormFloat32", _rounded_last), Rounding("LayerNorm", _rounded_first))
_BIASED = (
    Rounding("LayerNorm", lambda t, n: _rounded_first(t, n) + t.bias),
    Rounding("LayerNorm", lambda t, n: (t.weight.float() * n + t.bias.float()).to(t.x.dtype), casts_back=True),
)
_MAMBA = (
    Rounding("MambaRMSNormGated", _rounded_first),
    Rounding("MambaRMSNormGated", _rounded_last, casts_back=True),
)
# the number of parameters, whether there is a gate -> kinds
KINDS: dict[tuple[int, bool], tuple[Kind, ...]] = {
    (0, False): (
        Kind(_itself, lambda t: 1.0, (Rounding("RMSNormWeightless", _rounded),)),
        Kind(_centred, lambda t: 1.0, (Rounding("LayerNormFloat32", _rounded),)),
    ),
    (1, False): (
        Kind(_itself, lambda t: t.weight, _WEIGHTED),
        Kind(_itself, lambda t: 1 + t.weight, _ZERO_CENTRED),
        Kind(_centred, lambda t: t.weight, _CENTRED),
    ),
    (2, False): (Kind(_centred, lambda t: t.weight, _BIASED),),
    (1, True): (
        Kind(_gated, lambda t: t.weight, _MAMBA, has_groups=True),
        _gated_behind("silu", F.silu),
        _gated_behind("sigmoid", torch.sigmoid),
    ),
}
