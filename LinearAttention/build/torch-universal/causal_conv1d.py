"""Causal convolutions of each channel by itself, over sequences that may be packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._common.arguments import check_tensors, empty_result
from .utils.packed_sequences import sequence_ids

ACTIVATIONS = {None: None, "silu": nn.functional.silu, "swish": nn.functional.silu}


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute ``Σ_k weight[:, k] x[..., t - (K - 1) + k]``, with zeros before the first token, and the activation.

    That is causal_conv1d_fn of transformers, models/qwen3_next/modeling_qwen3_next.py. In packed rows a token sees
    those of its own sequence alone: there each tap is a product of its own, in float32, and the sum is rounded once.

    Args:
        x: ``[B, C, T]``, of a floating dtype.
        weight: ``[C, K]``.
        bias: ``[C]``, or None.
        activation: ``silu``, ``swish`` or None.
        seq_idx: the number of the sequence of each token, ``[B, T]``.
        cu_seqlens: where each sequence of the one row begins, and the last one ends, ``[S + 1]``.

    Returns:
        ``[B, C, T]`` in the dtype of x.

    Raises:
        ValueError: shapes or devices do not fit, or the activation is another one.
        TypeError: an argument is not floating point, or numbers of sequences are not integers.
    """
    _check(x, weight, bias, activation)
    batch, channels, length = x.shape
    sequences = sequence_ids(batch, length, x.device, cu_seqlens, seq_idx)
    if not x.numel():
        return empty_result(x, weight, bias, shape=x.shape, dtype=x.dtype)
    if sequences is not None:
        return _activated(_packed_conv1d(x, weight, bias, sequences), activation).to(x.dtype)
    padding = weight.shape[-1] - 1
    bias = None if bias is None else bias.to(weight.dtype)
    y = nn.functional.conv1d(x.to(weight.dtype), weight.unsqueeze(1), bias, padding=padding, groups=channels)
    return _activated(y[..., :length], activation).to(x.dtype)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Compute the convolution of new tokens behind those of a state, and move the new ones into the state.

    Args:
        x: ``[B, C, T]``, of a floating dtype.
        conv_state: the last W tokens before, ``[B, C, W]`` with W of at least K - 1; it is written to.
        weight: ``[C, K]``.
        bias: ``[C]``, or None.
        activation: ``silu``, ``swish`` or None.

    Returns:
        ``[B, C, T]`` in the dtype of x.

    Raises:
        ValueError: shapes or devices do not fit, or the activation is another one.
        TypeError: an argument is not floating point.
    """
    _check(x, weight, bias, activation, conv_state)
    if conv_state.dim() != 3 or conv_state.shape[:2] != x.shape[:2] or conv_state.shape[2] < weight.shape[1] - 1:
        raise ValueError(
            f"conv_state {list(conv_state.shape)} must be [B, C, W] with W of at least {weight.shape[1] - 1}, "
            f"x is {list(x.shape)}"
        )
    if not x.numel():
        return empty_result(x, conv_state, weight, bias, shape=x.shape, dtype=x.dtype)
    length = x.shape[-1]
    both = torch.cat([conv_state, x], -1).to(weight.dtype)
    conv_state.copy_(both[..., length:])
    bias = None if bias is None else bias.to(weight.dtype)
    y = nn.functional.conv1d(both, weight.unsqueeze(1), bias, groups=x.shape[1])
    return _activated(y[..., -length:], activation).to(x.dtype)


def _packed_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, sequences: Tensor) -> Tensor:
    """Compute the convolution in float32, tap by tap, without tokens of other sequences."""
    taps, length = weight.float().unsqueeze(-1).unbind(1), x.shape[-1]
    padded = nn.functional.pad(x.float(), (len(taps) - 1, 0))
    sequences = nn.functional.pad(sequences, (len(taps) - 1, 0), value=-1)
    own = sequences[:, len(taps) - 1 :]
    y = padded[..., len(taps) - 1 :] * taps[-1]
    for place, tap in enumerate(taps[:-1]):
        same = (sequences[:, place : place + length] == own).unsqueeze(1)
        y = torch.addcmul(y, padded[..., place : place + length] * same, tap)
    return y if bias is None else y + bias.float().unsqueeze(-1)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    function = ACTIVATIONS[activation]
    return y if function is None else function(y)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, conv_state: Tensor | None = None
) -> None:
    """Raise what the functions of this file document, for arguments that do not fit."""
    check_tensors(x=x, conv_state=conv_state, weight=weight, bias=bias)
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"x {list(x.shape)} must be [B, C, T], and weight {list(weight.shape)} [C, K] with K of at least 1"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must be [C], here [{weight.shape[0]}]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} must be one of {[*ACTIVATIONS]}")
