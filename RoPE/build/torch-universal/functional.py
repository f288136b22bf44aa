"""Rotary position embedding as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .rotate_qk import rotate_qk
from .rotation import check, rotate


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Compute ``x * cos + rotated(x) * sin``, where ``rotated`` turns ``[x1, x2]`` into ``[-x2, x1]``.

    It is one launch of ``npu_rotary_mul`` on the NPU, computed in float32 and rounded once, in the layout that the
    memory of ``x`` has; the same formula in torch beyond the limits of the operator. Differentiable.

    Args:
        x: ``[B, N, S, D]`` or ``[B, S, N, D]``, of a floating dtype, or whatever else cos broadcasts to; D is even.
        cos: of as many dimensions as x, or fewer, each of one or as in x: ``[B, 1, S, D]`` beside ``[B, N, S, D]``.
        sin: as cos.
        interleaved: rotate the pairs ``(x[2i], x[2i + 1])`` instead of ``(x[i], x[i + D/2])``; cos and sin then hold
            each value twice, one after the other.

    Returns:
        The shape of x, in the dtype that x and cos promote to, as in torch.

    Raises:
        ValueError: the shapes do not fit, or the tensors are on different devices.
        TypeError: a tensor is not floating point.
    """
    check(cos, sin, x=x)
    return rotate(x, cos, sin, interleaved)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by halves, as ``apply_rotary_pos_emb`` of transformers, models/llama/modeling_llama.py.

    What is said of :func:`rotary_mul` holds for each of them.

    Args:
        q: ``[B, N, S, D]``, of a floating dtype, or ``[B, S, N, D]`` with unsqueeze_dim 2.
        k: as q, with a number of heads of its own.
        cos: ``[B, S, D]`` or ``[1, S, D]``.
        sin: as cos.
        unsqueeze_dim: where cos and sin get the dimension of the heads.

    Returns:
        q and k, rotated, each in the dtype that it and cos promote to.

    Raises:
        ValueError: the shapes do not fit, or the tensors are on different devices.
        TypeError: a tensor is not floating point.
    """
    return rotate_qk(q, k, cos, sin, unsqueeze_dim)


def apply_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by positions of time, height and width, as Qwen2-VL did: cos and sin are composed, then used.

    That is ``apply_multimodal_rotary_pos_emb`` of models/qwen2_vl/modeling_qwen2_vl.py in earlier releases of
    transformers.

    Args:
        q: ``[B, N, S, D]``, of a floating dtype.
        k: as q, with a number of heads of its own.
        cos: ``[3, B, S, D]``, for time, height and width.
        sin: as cos.
        mrope_section: how many of the D/2 frequencies go by time, height and width.
        unsqueeze_dim: where cos and sin get the dimension of the heads.

    Returns:
        q and k, rotated, each in the dtype that it and cos promote to.

    Raises:
        ValueError: the shapes do not fit, or the tensors are on different devices.
        TypeError: a tensor is not floating point.
    """
    check(cos, sin, q=q, k=k)
    if cos.dim() < 2 or cos.shape[0] != 3:
        raise ValueError(f"cos {list(cos.shape)} must be [3, B, S, D]: one each for time, height and width")
    if 2 * sum(mrope_section) != cos.shape[-1]:
        raise ValueError(f"mrope_section {mrope_section} must add up to half the head size of cos {list(cos.shape)}")
    sections = list(mrope_section) * 2
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(table.split(sections, -1))], -1).unsqueeze(unsqueeze_dim)
        for table in (cos, sin)
    )
    return rotate(q, cos, sin), rotate(k, cos, sin)
