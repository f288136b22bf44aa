"""Causal convolutions of each channel by itself, over sequences that may be packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._common.arguments import check_tensors
from .utils.empty_result import empty_of
from .utils.packed_sequences import numbers_of

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
    those of its own sequence alone: then one product a tap, in float32, rounded once.

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
    numbers = numbers_of(batch, length, x.device, cu_seqlens, seq_idx)
    if not x.numel():
        return empty_of(x, weight, bias, shape=x.shape, dtype=x.dtype)
    if numbers is not None:
        return _activated(_by_taps(x, weight, bias, numbers), activation).to(x.dtype)
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
    """Compute the convolution of new tokens behind the last ones, and put the new ones into their place.

    Args:
        x: ``[B, C, T]``, of a floating dtype.
        conv_state: the tokens before, ``[B, C, W]`` with W of at least K - 1; it is written to.
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
        return empty_of(x, conv_state, weight, bias, shape=x.shape, dtype=x.dtype)
    length = x.shape[-1]
    both = torch.cat([conv_state, x], -1).to(weight.dtype)
    conv_state.copy_(both[..., length:])
    bias = None if bias is None else bias.to(weight.dtype)
    y = nn.functional.conv1d(both, weight.unsqueeze(1), bias, groups=x.shape[1])
    return _activated(y[..., -length:], activation).to(x.dtype)


def _by_taps(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor) -> Tensor:
    """Compute the convolution in float32, tap by tap, without those that lie in another sequence."""
    taps, length = weight.float().unsqueeze(-1).unbind(1), x.shape[-1]
    wide = nn.functional.pad(x.float(), (len(taps) - 1, 0))
    numbers = nn.functional.pad(numbers, (len(taps) - 1, 0), value=-1)
    own = numbers[:, len(taps) - 1 :]
    y = wide[..., len(taps) - 1 :] * taps[-1]
    for place, tap in enumerate(taps[:-1]):
        there = (numbers[:, place : place + length] == own).unsqueeze(1)
        y = torch.addcmul(y, wide[..., place : place + length] * there, tap)
    return y if bias is None else y + bias.float().unsqueeze(-1)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    function = ACTIVATIONS[activation]
    return y if function is None else function(y)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, conv_state: Tensor | None = None
) -> None:
    """Raise what the functions here say of arguments that do not fit."""
    check_tensors(x=x, conv_state=conv_state, weight=weight, bias=bias)
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"x {list(x.shape)} must be [B, C, T], and weight {list(weight.shape)} [C, K] with K of at least 1"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must be [C], here [{weight.shape[0]}]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} must be one of {[*ACTIVATIONS]}")
