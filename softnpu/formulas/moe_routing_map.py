"""Define MoE token permutation by a routing map [T, E], which marks the experts of every token, and back.

op-plugin, op_plugin/ops/opapi/MoeToken{Permute,Unpermute}WithRoutingMap*.cpp; formulas and dtypes: CANN's
ops-transformer, moe/moe_token_{permute,unpermute}_with_routing_map{,_grad}/README.md. Sums are taken in float32 and
rounded once, which is inferred. Without drop_and_pad every token has the same number K of experts, and rows lie in the
order of the experts: ``sorted_indices [T · K]`` names the row of every token and slot. With it every expert has C rows,
filled up with tokens that are not its own: ``sorted_indices [E · C]`` names the token of every row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, float32, int8, int32

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.formulas import formula

UNWRITTEN = -1  # of integers, which have no NaN


@formula
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the rows of ``tokens [T, H]`` for the experts, their probabilities out of [T, E], and sorted_indices."""
    operator = "npu_moe_token_permute_with_routing_map"
    require_dtypes(operator, {(d,) for d in FLOATING}, tokens=tokens)
    _require_map(operator, routing_map, probs)
    count, experts = routing_map.shape
    fits = tokens.dim() == 2 and len(tokens) == count
    require(fits, operator, f"tokens must be [{count}, H], got {describe(tokens)}")
    rows = count if num_out_tokens is None else num_out_tokens
    if drop_and_pad:
        capacity = rows // experts
        require(0 < capacity <= count, operator, f"num_out_tokens {rows} gives {capacity} rows of {count} an expert")
        chosen = torch.sort(routing_map.T.to(int8), dim=-1, descending=True, stable=True)[1][:, :capacity].flatten()
        kept = None if probs is None else probs[chosen, _owners(experts, capacity)]
        return tokens[chosen], kept, chosen.to(int32)
    top_k = rows // count
    _require_top_k(operator, routing_map, top_k)
    owners, chosen = routing_map.T.nonzero(as_tuple=True)
    kept = None if probs is None else probs[chosen, owners]
    return tokens[chosen], kept, torch.argsort(chosen, stable=True).to(int32)


@formula
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the tokens [T, H], the sum of its rows', and of the probabilities [T, E]."""
    operator = "npu_moe_token_permute_with_routing_map_grad"
    grad = permuted_token_out_grad
    require_dtypes(operator, {(d, int32) for d in FLOATING}, grad=grad, sorted_indices=sorted_indices)
    _require_map(operator, routing_map, None)
    fits = tuple(routing_map.shape) == (tokens_num, experts_num)
    require(fits, operator, f"routing_map must be {[tokens_num, experts_num]}, got {describe(routing_map)}")
    owner, token = _rows(operator, grad, sorted_indices, routing_map, drop_and_pad)
    total = torch.zeros(tokens_num, grad.shape[1]).index_add_(0, token, grad.float())
    if probs_grad is None:
        return total.to(grad.dtype), None
    require(probs_grad.shape == token.shape, operator, f"probs_grad must be {list(token.shape)}")
    dprobs = torch.zeros(tokens_num, experts_num, dtype=probs_grad.dtype)
    dprobs[token, owner] = probs_grad
    return total.to(grad.dtype), dprobs


@formula
def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return every token's sum of its rows, times their probabilities, and what the gradient needs with drop_and_pad.

    Those are the order of the rows by token, and the tokens in that order; without drop_and_pad they stay unwritten,
    here -1. npu_moe_token_unpermute_with_routing_map calls this operator. The last result is the probability of every
    row.
    """
    operator = "npu_moe_token_unpermute_with_routing_map"
    x = permuted_tokens
    require_dtypes(operator, {(d, int32) for d in FLOATING}, permuted_tokens=x, sorted_indices=sorted_indices)
    _, token, probs_of_rows = _weights(operator, x, sorted_indices, probs, routing_map, drop_and_pad)
    fits = len(restore_shape) == 2 and x.shape[1] == restore_shape[1]
    require(fits, operator, f"restore_shape must be [T, {x.shape[1]}], got {list(restore_shape)}")
    require_values(
        int(token.max()) < restore_shape[0], operator, f"restore_shape {list(restore_shape)} has too few tokens"
    )
    weighted = x.float() if probs_of_rows is None else x.float() * probs_of_rows.float().unsqueeze(-1)
    total = torch.zeros(tuple(restore_shape)).index_add_(0, token, weighted).to(x.dtype)
    if not drop_and_pad:
        nothing = torch.full_like(sorted_indices, UNWRITTEN)
        return total, nothing, nothing.clone(), probs_of_rows
    values, order = sorted_indices.sort(stable=True)
    return total, order.to(int32), values, probs_of_rows


@formula
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """Return the first result of the operator with the underscore, in releases that have no such operator."""
    return _npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )[0]


@formula
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of every row, and of the probabilities [T, E] in the dtype of the other gradient."""
    operator = "npu_moe_token_unpermute_with_routing_map_grad"
    grad = unpermuted_tokens_grad
    indices = {"out_index": out_index, "permuted_token_id": permuted_token_id}
    require_dtypes(operator, {(d, int32, int32) for d in FLOATING}, grad=grad, **indices)
    sorted_indices = out_index
    if drop_and_pad:
        sorted_indices = torch.empty_like(permuted_token_id)
        sorted_indices[out_index.long()] = permuted_token_id
    like = grad.new_empty(len(out_index), grad.shape[1])
    owner, token, probs_of_rows = _weights(operator, like, sorted_indices, probs, routing_map, drop_and_pad)
    g = grad.float()[token]
    if probs is None or probs_of_rows is None:
        return g.to(grad.dtype), None
    if permuted_tokens is None:
        raise RuntimeError(f"{operator}: the gradient of probs needs permuted_tokens")
    dprobs = torch.zeros(probs.shape)
    dprobs[token, owner] = (g * permuted_tokens.float()).sum(-1)
    return (g * probs_of_rows.float().unsqueeze(-1)).to(grad.dtype), dprobs.to(grad.dtype)


def _weights(
    operator: str, rows: Tensor, indices: Tensor, probs: Tensor | None, routing_map: Tensor | None, padded: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the expert, the token and the probability of every row."""
    if padded and probs is None and routing_map is None:
        return torch.zeros_like(indices), indices.long(), None
    if routing_map is None:
        require(padded, operator, "routing_map is needed without drop_and_pad")
        routing_map = torch.ones(probs.shape, dtype=torch.bool)  # type: ignore[union-attr]  # one of both is given
    _require_map(operator, routing_map, probs)
    owner, token = _rows(operator, rows, indices, routing_map, padded)
    return owner, token, None if probs is None else probs[token, owner]


def _rows(operator: str, rows: Tensor, indices: Tensor, routing_map: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
    """Return the expert and the token of every row."""
    count, experts = routing_map.shape
    require(rows.dim() == 2, operator, f"rows must be [R, H], got {describe(rows)}")
    require(indices.shape == rows.shape[:1], operator, f"{describe(indices)} must name {len(rows)} rows")
    most = count if padded else len(rows)
    inside = bool(((indices >= 0) & (indices < most)).all())
    require(inside, operator, f"sorted_indices must be in [0, {most})")
    if padded:
        capacity = len(rows) // experts
        require(capacity * experts == len(rows), operator, f"{len(rows)} rows for {experts} experts")
        return _owners(experts, capacity), indices.long()
    _require_top_k(operator, routing_map, len(rows) // count)
    require(indices.unique().numel() == len(rows), operator, "sorted_indices names a row twice")
    owner, _ = routing_map.T.nonzero(as_tuple=True)
    token = torch.empty_like(owner)
    token[indices.long()] = torch.arange(count).repeat_interleave(len(rows) // count)
    return owner, token


def _owners(experts: int, capacity: int) -> Tensor:
    return torch.arange(experts).repeat_interleave(capacity)


def _require_map(operator: str, routing_map: Tensor, probs: Tensor | None) -> None:
    require_dtypes(operator, {(int8,), (torch.bool,)}, routing_map=routing_map)
    fits = routing_map.dim() == 2 and routing_map.numel() > 0
    require(fits, operator, f"routing_map must be [T, E], got {describe(routing_map)}")
    if probs is not None:
        fits = probs.shape == routing_map.shape and probs.dtype in FLOATING
        require(fits, operator, f"probs must have the shape of {describe(routing_map)}, got {describe(probs)}")


def _require_top_k(operator: str, routing_map: Tensor, top_k: int) -> None:
    same = bool((routing_map.sum(-1, dtype=float32) == top_k).all())
    require(top_k > 0 and same, operator, f"routing_map must give every token {top_k} experts, as many as rows a token")
