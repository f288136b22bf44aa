"""Masks that a caller made: as the operators want them, made once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._common.captures import capturing
from ..attention_spec import FULL, Band
from ..ops.reference import outside
from .mask_description import MaskDescription
from .mask_functions import Pattern

# what was made of a tensor, with the version that it was made of
_inverted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_descriptions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def of_the_caller(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Band | Tensor, Tensor | None]:
    """Return what a mask leaves out, and what it adds to the scores.

    Args:
        mask: bool ``[B or 1, N or 1, S_q or 1, S_k]``, True where a query sees a key, or floating and added to scores.
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``.

    Raises:
        ValueError: the mask has another shape.
    """
    shape = (*query.shape[:3], key.shape[2])
    if mask.dim() != 4 or any(a not in (1, b) for a, b in zip(mask.shape[:3], shape)) or mask.shape[3] != shape[3]:
        raise ValueError(
            f"attention_forward: attention_mask must be {list(shape)}, with 1 for what is alike, got {list(mask.shape)}"
        )
    left_out = _left_out(mask)
    return (FULL, mask.to(query.device)) if left_out is None else (left_out.to(query.device), None)


def described(padding: Tensor, queries: int, keys: int, band: Band) -> MaskDescription:
    """Describe the mask of padding that a model hands on as it is, once for all layers.

    Args:
        padding: ``[B, tokens]``, zero where a token is padding; the keys are the last of them.
        queries: how many there are.
        keys: likewise.
        band: which keys a query sees of those that are no padding.
    """
    version = None if padding.is_inference() or capturing() else padding._version
    wanted = (version, queries, keys, band)
    known = _descriptions.get(padding)
    if version is not None and known is not None and known[0] == wanted:
        return known[1]
    kept = padding[:, -keys:].bool()

    def make(begin: int, end: int) -> Tensor:
        beyond = outside(band, queries, keys, kept.device)
        mask = kept[:, None, None].expand(-1, -1, queries, -1)
        return (mask if beyond is None else mask & ~beyond)[:, :, begin:end]

    description = MaskDescription(queries, keys, Pattern(band), kept, make)
    if version is not None:
        _descriptions[padding] = wanted, description
    return description


def _left_out(mask: Tensor) -> Tensor | None:
    """Return which keys a mask leaves out; None where it adds something else to the scores."""
    if torch.compiler.is_compiling():
        return _inverse(mask)
    version = None if mask.is_inference() or capturing() else mask._version
    known = _inverted.get(mask)
    if version is not None and known is not None and known[0] == version:
        return known[1]
    left_out = _inverse(mask)
    if version is not None:
        _inverted[mask] = version, left_out
    return left_out


def _inverse(mask: Tensor) -> Tensor | None:
    """Compute what a mask leaves out. The host waits for it where the mask is floating, and not known to be a bias.

    Which keys a query sees is one for all heads; what a head has of its own is a bias, which each layer makes anew.
    """
    if not mask.is_floating_point():
        return mask.logical_not()
    is_of_heads = mask.shape[1] > 1 and mask.stride(1) != 0
    if is_of_heads or mask.requires_grad or torch.compiler.is_compiling() or isinstance(mask, FakeTensor):
        return None
    left_out = mask <= torch.finfo(mask.dtype).min / 2
    return left_out if bool((left_out | (mask == 0)).all()) else None
