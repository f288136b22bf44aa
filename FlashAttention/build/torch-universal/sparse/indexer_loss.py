"""The loss that trains a lightning indexer: how far its scores are from the attention that was paid.

DeepSeek-V3.2 (its paper, section 2.1) adds up, for each query, the Kullback-Leibler divergence of the softmax of the
indexer's scores from the weights of attention, which are summed over heads and divided by their sum: over all keys that
a query sees in the dense warm-up, and over the chosen ones from then on.

Neither scores nor masks of all queries and keys are in memory: a block of queries takes no more than ``BLOCK_BYTES`` of
sparse_attention.py. Gradients are computed with the loss, and saved in place of what they are computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.arguments import narrowed
from .._common.autocast import without_autocast
from .._common.second_order import differentiable_once
from ..masks.mask_description import MaskDescription
from ..ops.limits import INTEGERS, LATENT_SIZE, MOST_LOSS_QUERIES, in_autocast_dtype, is_fused_indexer_loss
from .sparse_attention import ABSENT, blocks_in_budget, gather_mask, mask_slice

_CAUSAL_LOWER_RIGHT = 3  # a value of sparse_mode
_TOP_K_STEP = 1024  # the operator takes multiples of it
_TINY = torch.finfo(torch.float32).tiny


def indexer_loss(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    mask: MaskDescription | Tensor,
    scale: float,
    indices: Tensor | None = None,
    index_scale: float = 1.0,
    counted: Tensor | None = None,
) -> Tensor:
    """Compute the sum over queries of ``KL(p || softmax(I))``, from which the indexer alone gets gradients.

    ``I`` is ``sum_h weights_h · relu(index_scale · index_query_h · index_key)``, ``p`` the mean over heads of
    ``softmax(scale · query · key)``; both are over the keys that a query sees, and of these over the chosen ones.

    Args:
        query: ``[B, S_q, N, D]``, of the attention; absorbed ones for latents.
        key: ``[B, S_k, N_k, D]``, where ``N`` is a multiple of ``N_k``. Of one head the chosen ones are gathered, of
            more than one all are computed with a mask.
        index_query: ``[B, S_q, H, D_i]``, of the indexer.
        index_key: ``[B, S_k, D_i]``.
        weights: ``[B, S_q, H]``.
        mask: what ``attention_mask`` returned, with padding and packed sequences; or bool, True where a query sees a
            key, ``[B or 1, S_q, S_k]`` or with heads before ``S_q``, of which the first one counts.
        scale: the factor of the products of attention.
        indices: ``[B, S_q, k]``, what :func:`top_k_keys` returned; None for all keys.
        index_scale: a positive factor of the products of the indexer.
        counted: bool ``[B, S_q]``, the queries that are added up; those that see no key add nothing anyway.

    Returns:
        float32, a scalar. It is differentiable once.

    Raises:
        ValueError: shapes do not fit.
        TypeError: a dtype is none that is taken.
    """
    _check(query, key, index_query, index_key, weights, mask, indices)
    query, key, index_query, index_key = in_autocast_dtype(query, key, index_query, index_key)
    query, key, *indexer = (narrowed(tensor) for tensor in (query, key, index_query, index_key, weights))
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in indexer)
    options = mask, scale, indices, index_scale, counted, is_trained
    with without_autocast(query):
        return IndexerLoss.apply(*indexer, query.detach(), key.detach(), *options)


def _check(
    query: Tensor, key: Tensor, index_query: Tensor, index_key: Tensor, weights: Tensor, mask: Any, indices: Any
) -> None:
    """Raise what :func:`indexer_loss` says of tensors that do not fit."""
    tensors = {"query": query, "key": key, "index_query": index_query, "index_key": index_key, "weights": weights}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"indexer_loss: {name} must be floating point, got {tensor.dtype}")
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise TypeError(f"indexer_loss: mask must be bool, got {mask.dtype}")
    if indices is not None and indices.dtype not in INTEGERS:
        raise TypeError(f"indexer_loss: indices must be integers, got {indices.dtype}")
    fits = (
        query.dim() == key.dim() == index_query.dim() == 4
        and index_key.dim() == 3
        and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
        and query.shape[2] % max(key.shape[2], 1) == 0
        and index_query.shape[:2] == query.shape[:2]
        and weights.shape == index_query.shape[:3]
        and index_key.shape[:2] == key.shape[:2]
        and index_key.shape[2] == index_query.shape[3]
        and (indices is None or (indices.dim() == 3 and indices.shape[:2] == query.shape[:2]))
    )
    if not fits:
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        raise ValueError(
            "indexer_loss: query [B, S_q, N, D], key [B, S_k, N_k, D], index_query [B, S_q, H, D_i], index_key "
            "[B, S_k, D_i], weights [B, S_q, H] and indices [B, S_q, k] have to fit, with N a multiple of N_k, got "
            f"{', '.join(map(str, shapes))} and {None if indices is None else list(indices.shape)}"
        )


class IndexerLoss(torch.autograd.Function):
    """Saves the gradients of the indexer's query, key and weights, which are computed with the loss."""

    @staticmethod
    def forward(
        ctx: Any, index_query: Tensor, index_key: Tensor, weights: Tensor, query: Tensor, key: Tensor, *options: Any
    ) -> Tensor:
        mask, scale, indices, index_scale, counted, _ = options
        given = query, key, index_query, index_key, weights
        if indices is not None and counted is None and is_fused_indexer_loss(*given, mask, indices):
            loss, *gradients = _fused_loss(*given, scale, indices, index_scale)
        else:
            loss, *gradients = _loss_in_torch(*given, *options)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(each * gradient for each in saved), *(None,) * 8


def _fused_loss(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    scale: float,
    indices: Tensor,
    index_scale: float,
) -> tuple[Tensor, ...]:
    """Launch ``npu_sparse_lightning_indexer_grad_kl_loss`` for causal attention, as many queries at a time as it takes.

    It reads of each query's indices as many as there are keys up to its own. The maxima and sums that it needs of the
    attention's softmax are those of ``npu_sparse_flash_attention``.
    """
    (batch, queries), keys = query.shape[:2], key.shape[1]
    indices = F.pad(indices.int(), (0, -indices.shape[-1] % _TOP_K_STEP), value=ABSENT).unsqueeze(2)
    weights, index_key = weights.float() * index_scale, index_key.unsqueeze(2)
    d_key = torch.zeros(batch, keys, 1, index_key.shape[-1], device=query.device)
    loss, parts = torch.zeros(1, device=query.device), []
    for begin in range(0, queries, MOST_LOSS_QUERIES):
        end = min(begin + MOST_LOSS_QUERIES, queries)
        reach = keys - queries + end
        attention, latents = query[:, begin:end], key[:, :reach]
        nope, latent = attention[..., :LATENT_SIZE].contiguous(), latents[..., :LATENT_SIZE].contiguous()
        query_rope, key_rope = attention[..., LATENT_SIZE:].contiguous(), latents[..., LATENT_SIZE:].contiguous()
        chosen = indices[:, begin:end]
        chosen = chosen.masked_fill(chosen >= reach, ABSENT) if reach < keys else chosen.contiguous()
        _, maximum, total = torch.ops.npu.npu_sparse_flash_attention(
            nope,
            latent,
            latent,
            chosen,
            scale,
            query_rope=query_rope,
            key_rope=key_rope,
            sparse_mode=_CAUSAL_LOWER_RIGHT,
            attention_mode=2,
            return_softmax_lse=True,
        )
        d_query, d_part, d_weights, part_loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(
            nope,
            latent,
            index_query[:, begin:end].contiguous(),
            index_key[:, :reach].contiguous(),
            weights[:, begin:end].contiguous(),
            chosen,
            maximum,
            total,
            scale,
            query_rope=query_rope,
            key_rope=key_rope,
            sparse_mode=_CAUSAL_LOWER_RIGHT,
        )
        d_key[:, :reach] += d_part
        loss += part_loss
        parts.append((d_query, d_weights * index_scale))
    d_queries, d_all_weights = (torch.cat(each, dim=1) for each in zip(*parts))
    return loss.squeeze(0), d_queries, d_key.squeeze(2).to(index_key.dtype), d_all_weights


class _Block(NamedTuple):
    """Holds a block of queries as ``T`` sets of ``K`` keys with ``r`` queries each.

    Where keys are gathered each query has a set of its own, otherwise all queries of a batch index have one.
    """

    queries: slice
    key: Tensor  # [T, K, N_k, D]
    index_key: Tensor  # [T, K, D_i]
    is_seen: Tensor  # bool [T or 1, r, K]
    flat_indices: Tensor | None  # [T · K], of gathered keys, into [B · S_k]

    def part(self, tensor: Tensor) -> Tensor:
        """Return the block's part of ``[B, S_q, ...]`` as ``[T, r, ...]``."""
        found = tensor[:, self.queries]
        return found if self.flat_indices is None else found.flatten(0, 1).unsqueeze(1)


def _loss_in_torch(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    mask: Any,
    scale: float,
    indices: Tensor | None,
    index_scale: float,
    counted: Tensor | None,
    is_trained: bool,
) -> tuple[Tensor, ...]:
    """Return the loss, and the gradients of index_query, index_key and weights, if they are wanted."""
    loss = torch.zeros((), device=query.device)
    d_query, d_weights = torch.empty_like(index_query), torch.empty_like(weights)
    d_key = torch.zeros(index_key.shape, device=query.device)
    for block in _blocks(query, key, index_query, index_key, mask, indices):
        target = _attention(block.part(query), block.key, block.is_seen, scale)
        own_query, own_weights = block.part(index_query).float(), block.part(weights).float()
        _, rows, heads, _ = own_query.shape
        own_query, own_key = own_query.flatten(1, 2), block.index_key.float()
        products = (own_query @ own_key.mT).mul_(index_scale).relu_().unflatten(1, (rows, heads))
        scores = (own_weights.unsqueeze(2) @ products).squeeze(2).masked_fill_(~block.is_seen, -torch.inf)
        log = scores.log_softmax(-1).masked_fill_(~block.is_seen, 0)  # NaN where a query sees no key
        distances = target * (target.clamp_min(_TINY).log() - log)
        d_scores = log.exp_().masked_fill_(~block.is_seen, 0).sub_(target)
        if counted is not None:
            own = block.part(counted).unsqueeze(-1)
            distances, d_scores = distances * own, d_scores * own
        loss += distances.sum()
        if not is_trained:
            continue
        d_weights[:, block.queries] = (products @ d_scores.unsqueeze(-1)).view_as(d_weights[:, block.queries])
        factors = (own_weights * index_scale).unsqueeze(-1)
        d_products = products.sign_().mul_(factors).mul_(d_scores.unsqueeze(2)).flatten(1, 2)
        d_query[:, block.queries] = (d_products @ own_key).view_as(d_query[:, block.queries])
        added = d_products.mT @ own_query
        if block.flat_indices is None:
            d_key[:, : added.shape[1]] += added
        else:
            d_key.view(-1, d_key.shape[-1]).index_add_(0, block.flat_indices, added.flatten(0, 1))
    return loss, d_query, d_key.to(index_key.dtype), d_weights


def _attention(query: Tensor, key: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    """Return the mean over heads of the weights of attention, ``[T, r, K]``; zero for a query that sees no key."""
    _, rows, heads, _ = query.shape
    groups = key.shape[2]
    query = query.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)  # [T, N_k, r · N / N_k, D]
    scores = (query.float() @ key.permute(0, 2, 3, 1).float()).mul_(scale).unflatten(2, (rows, -1))
    scores = scores.masked_fill_(~is_seen[:, None, :, None], -torch.inf)
    return scores.softmax(-1).sum((1, 3)).div_(heads).masked_fill_(~is_seen, 0)


def _blocks(
    query: Tensor, key: Tensor, index_query: Tensor, index_key: Tensor, mask: Any, indices: Tensor | None
) -> Iterator[_Block]:
    """Yield one block of queries after the other, each with the keys that it may see, or that were chosen for it."""
    (batch, queries, heads, size), (_, keys, groups, _) = query.shape, key.shape
    is_gathered = indices is not None and groups == 1
    count = indices.shape[-1] if indices is not None and is_gathered else keys
    query_bytes = 4 * count * (3 * heads + 2 * index_query.shape[2])
    if is_gathered:
        query_bytes += count * (size + index_key.shape[-1]) * (4 + key.element_size())
    first = torch.arange(batch, device=query.device).view(-1, 1, 1) * keys
    for begin, end in blocks_in_budget(queries, batch * query_bytes):
        is_seen = mask_slice(mask, begin, end, query)[..., :keys]
        if is_gathered:
            chosen = indices[:, begin:end].long()
            flat, sets = (chosen + first).flatten(), batch * (end - begin)
            parts = (each.flatten(0, 1).index_select(0, flat).unflatten(0, (sets, count)) for each in (key, index_key))
            yield _Block(slice(begin, end), *parts, gather_mask(is_seen, chosen).flatten(0, 1).unsqueeze(1), flat)
            continue
        reach = mask.visible_keys(end, keys) if isinstance(mask, MaskDescription) else keys
        if indices is not None:
            # uint8: CANN scatters bool on an AI CPU (ops-nn, scatter_elements.cpp, AICORE_910B_DTYPE_SUPPORT_LIST)
            is_chosen = torch.zeros(batch, end - begin, keys, dtype=torch.uint8, device=query.device)
            is_seen = is_seen & is_chosen.scatter_(-1, indices[:, begin:end].long(), 1).bool()
        yield _Block(slice(begin, end), key[:, :reach], index_key[:, :reach], is_seen[..., :reach], None)
