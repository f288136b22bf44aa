"""Mask tensors of a caller, converted for the operators once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._common.captures import capturing
from ..attention_spec import FULL, Band
from ..ops.reference import masked_out_by_band
from .mask_description import MaskDescription
from .mask_functions import MaskStructure

# what a mask is a part of -> its version and the part that was converted, and the result
_inverted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_descriptions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def split_caller_mask(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Band | Tensor, Tensor | None]:
    """Return a mask as what it masks out, and as a bias that is added to the scores: it is one or the other.

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
    masked_out = _masked_out(mask)
    return (FULL, mask.to(query.device)) if masked_out is None else (masked_out.to(query.device), None)


def describe_padding(padding: Tensor, queries: int, keys: int, band: Band) -> MaskDescription:
    """Describe the mask of a padding mask that a model passes on as it is, once for all layers.

    Args:
        padding: ``[B, tokens]``, zero where a token is padding; the keys are the last tokens.
        queries: the number of queries.
        keys: the number of keys.
        band: which keys a query sees but padding.
    """
    version = None if padding.is_inference() or capturing() else padding._version
    wanted = (version, queries, keys, band)
    found = _descriptions.get(padding)
    if version is not None and found is not None and found[0] == wanted:
        return found[1]
    is_token = padding[:, -keys:].bool()

    def make(begin: int, end: int) -> Tensor:
        outside = masked_out_by_band(band, queries, keys, is_token.device)
        mask = is_token[:, None, None].expand(-1, -1, queries, -1)
        return (mask if outside is None else mask & ~outside)[:, :, begin:end]

    description = MaskDescription(queries, keys, MaskStructure(band), is_token, make)
    if version is not None:
        _descriptions[padding] = wanted, description
    return description


def _masked_out(mask: Tensor) -> Tensor | None:
    """Return which keys a mask masks out; None where it is a bias. The result is remembered.

    Layers that each take the same part of one, as code of transformers 4 does, are given the same.
    """
    if torch.compiler.is_compiling() or mask.is_inference() or capturing():
        return _inverse(mask)
    whole = mask if mask._base is None else mask._base
    part = mask._version, mask.shape, mask.stride(), mask.storage_offset()
    found = _inverted.get(whole)
    if found is None or found[0] != part:
        found = _inverted[whole] = part, _inverse(mask)
    return found[1]


def _inverse(mask: Tensor) -> Tensor | None:
    """Compute which keys a mask masks out; None where it is a bias.

    For a floating mask that is the same for all heads the host waits, to learn if its values are all zero or the
    dtype's smallest. One that differs by head is taken for a bias, which each layer makes anew.
    """
    if not mask.is_floating_point():
        return mask.logical_not()
    differs_by_head = mask.shape[1] > 1 and mask.stride(1) != 0
    if differs_by_head or mask.requires_grad or torch.compiler.is_compiling() or isinstance(mask, FakeTensor):
        return None
    masked_out = mask <= torch.finfo(mask.dtype).min / 2
    return masked_out if bool((masked_out | (mask == 0)).all()) else None
