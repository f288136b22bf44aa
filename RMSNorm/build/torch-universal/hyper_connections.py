"""Hyper-connections: several residual streams, of which a block gets a sum, with weights that the streams decide.

Tensors are ``[..., N, H]``, N streams of H values. Everything is computed in float32, whatever autocast says.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.arguments import check_tensors
from ._common.autocast import without_autocast
from ._common.derivatives import gradients, is_transformed
from ._common.distributed import is_distributed

_NEGLIGIBLE = 1e-5  # an eps whose part in sums of one is that of the roundings of float32, some of each round


def hyper_connection(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a block gets, and the weights with which its result and the streams become the next streams.

    That is DeepseekV4HyperConnection.forward of transformers, models/deepseek_v4/modeling_deepseek_v4.py: manifold
    constrained hyper-connections (arXiv 2512.24880). Rounds of Sinkhorn and Knopp normalise N by N weights by their
    columns and rows; here one is two launches, over the logarithms of all tokens side by side. They are computed again
    for the gradient, so that none is kept.

    Args:
        streams: ``[..., N, H]``, of a floating dtype.
        weight: ``[(2 + N) * N, N * H]``, of the projection.
        base: ``[(2 + N) * N]``, added to what it gives.
        scale: ``[3]``, one for each part of it: for the sum, the block's result, and the N by N weights.
        norm_eps: added to the mean of the squares of all streams.
        eps: added to weights and to the sums by which they are divided; positive.
        rounds: how often columns are normalised, and rows once less.

    Returns:
        The weights of the block's result ``[..., N]`` and those of the streams ``[..., N, N]``, from the first of them
        to the second, in float32; and the sum ``[..., H]`` in the dtype of ``streams``.

    Raises:
        TypeError: an argument is not floating point.
        ValueError: shapes or devices do not fit, eps is not positive, or there is no round.
    """
    _check(streams, weight, base, scale, eps, rounds)
    n, hidden = streams.shape[-2:]
    with without_autocast(streams):
        streams_fp32, logits = _project_streams(streams, weight, base, scale, (n, n, n * n), norm_eps)
        pre, post = logits[:, : 2 * n].sigmoid().split(n, -1)
        # tokens side by side: rows and columns are sums of whole vectors
        mixed = sinkhorn(logits[:, 2 * n :].t().contiguous().view(n, n, -1), eps, rounds)
        mixed = mixed.flatten(0, 1).t().contiguous()
        collapsed = _sum_streams(pre + eps, streams_fp32).to(streams.dtype)
    lead = streams.shape[:-2]
    return (2 * post).view(*lead, n), mixed.view(*lead, n, n), collapsed.view(*lead, hidden)


def independent_hyper_connection(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, magnitude: float
) -> tuple[Tensor, Tensor]:
    """Compute :func:`hyper_connection` without weights of streams for each other: HYV4HyperConnection.forward.

    ``weight`` is ``[2 * N, N * H]``, and the weights of the block's result are up to ``magnitude``, with eps.
    """
    n, hidden = streams.shape[-2:]
    with without_autocast(streams):
        streams_fp32, logits = _project_streams(streams, weight, base, scale, (n, n), norm_eps)
        pre, post = logits.sigmoid().split(n, -1)
        collapsed = _sum_streams(pre + eps, streams_fp32).to(streams.dtype)
        post = magnitude * post + eps
    return post.view(streams.shape[:-1]), collapsed.view(*streams.shape[:-2], hidden)


def hyper_head(streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float) -> Tensor:
    """Compute the sum of the streams alone: DeepseekV4HyperHead.forward. ``weight`` is ``[N, N * H]``."""
    n, hidden = streams.shape[-2:]
    with without_autocast(streams):
        streams_fp32, logits = _project_streams(streams, weight, base, scale, (n,), norm_eps)
        collapsed = _sum_streams(logits.sigmoid() + eps, streams_fp32).to(streams.dtype)
    return collapsed.view(*streams.shape[:-2], hidden)


def sinkhorn(logits: Tensor, eps: float, rounds: int) -> Tensor:
    """Normalise ``softmax(logits, 1) + eps`` by columns (dimension 0) and rows, ``[N, N, T]`` in float32."""
    is_trained = torch.is_grad_enabled() and logits.requires_grad
    if is_trained and not (torch.compiler.is_compiling() or is_transformed() or is_distributed(logits)):
        return _Sinkhorn.apply(logits, eps, rounds)
    return _sinkhorn_rounds(logits, eps, rounds)


class _Sinkhorn(torch.autograd.Function):
    """Keeps the logits alone, and computes all rounds again for their gradient."""

    @staticmethod
    def forward(ctx, logits: Tensor, eps: float, rounds: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.terms = eps, rounds
        return _sinkhorn_rounds(logits, eps, rounds)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (gradient,) = gradients(lambda logits: _sinkhorn_rounds(logits, *ctx.terms), ctx.saved_tensors, (True,), grad)
        return gradient, None, None


def _sinkhorn_rounds(logits: Tensor, eps: float, rounds: int) -> Tensor:
    """Compute the rounds, each in logarithms: log_softmax divides by a sum in one launch.

    The first, whose sums may be of the size of eps, adds it as transformers does, and so does the last. In between
    sums are near one: an eps as small as theirs would change all weights by one factor, which the next sum takes out
    again. A larger one is added each time.
    """
    weights = logits.softmax(1) + eps
    weights = weights / (weights.sum(0, keepdim=True) + eps)
    if rounds == 1 or eps > _NEGLIGIBLE:
        for _ in range(rounds - 1):
            weights = weights / (weights.sum(1, keepdim=True) + eps)
            weights = weights / (weights.sum(0, keepdim=True) + eps)
        return weights
    weights = weights.log()
    for _ in range(rounds - 2):
        weights = weights.log_softmax(1).log_softmax(0)
    return weights.log_softmax(1).softmax(0) / (1 + eps)


def _project_streams(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, sizes: tuple[int, ...], norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Return the streams ``[T, N, H]`` in float32, and what the projection of their norm gives, scaled, ``[T, M]``.

    The norm is one number a token, by which the product is divided: no normed streams are written. It is taken over
    pieces of 64 values first, since torch adds a long row up one by one.
    """
    streams_fp32 = streams.float().flatten(0, -3)
    flat = streams_fp32.flatten(1)
    piece = 1 if flat.shape[-1] % 64 else 64
    sums = torch.linalg.vector_norm(flat.unflatten(-1, (-1, piece)), dim=-1).square().mean(-1, keepdim=True)
    product = F.linear(flat, weight.float()) * torch.rsqrt(sums + norm_eps * piece)
    scales = torch.cat([each.expand(size) for each, size in zip(scale.float().split(1), sizes)])
    return streams_fp32, torch.addcmul(base.float(), product, scales, value=piece**0.5)


def _sum_streams(weights: Tensor, streams_fp32: Tensor) -> Tensor:
    """Sum the streams ``[T, N, H]`` with weights ``[T, N]``."""
    return torch.bmm(weights.unsqueeze(1), streams_fp32).squeeze(1)


def _check(streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, eps: float, rounds: int) -> None:
    check_tensors(streams=streams, weight=weight, base=base, scale=scale)
    if streams.dim() < 2:
        raise ValueError(f"hyper_connection: streams must be [..., N, H], got {list(streams.shape)}")
    n, hidden = streams.shape[-2:]
    rows = (2 + n) * n
    if weight.shape != (rows, n * hidden) or base.shape != (rows,) or scale.shape != (3,):
        raise ValueError(
            f"hyper_connection: {n} streams of {hidden} values take a weight {[rows, n * hidden]}, a base {[rows]} and "
            f"a scale [3], got {list(weight.shape)}, {list(base.shape)} and {list(scale.shape)}"
        )
    if eps <= 0 or rounds < 1:
        raise ValueError(f"hyper_connection: eps must be positive and rounds at least 1, got {eps} and {rounds}")
