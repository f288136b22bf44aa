"""Define npu_lightning_indexer and npu_sparse_flash_attention, which choose keys and attend to them, and the gradients.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md and torch_npu-npu_sparse_flash_attention.md,
test/test_custom_ops of both names, op_plugin/config/derivatives.yaml; docs/context of branch 7.3.0 for CANN 8.5.
What is written of sequences without queries or keys: CANN's ops-transformer, attention/lightning_indexer, its kernel's
``SplitCore``, ``ProcessMain`` and ``ProcessInvalid``, and its golden function in tests/pytest.
Inferred: products and sums are in float32, weights of attention are rounded to the dtype of the query, results once; of
equal scores the first key is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, bfloat16, float16, float32, int32

from softnpu.argument_checks import describe, require, require_dtypes, require_values
from softnpu.cann import require_before
from softnpu.formulas import formula

UNBOUNDED = 2**63 - 1
ALL, RIGHT_DOWN_CAUSAL = 0, 3
INDEX_SIZE, LATENT, ROTARY = 128, 512, 64
MASKED = -1e12  # the score of a key that is chosen and not seen
ABSENT = -1  # an index for which there is no key
UNWRITTEN = 2**31 - 1  # an index of which the operator writes nothing
HALVES: set[tuple[torch.dtype, ...]] = {(float16, float16), (bfloat16, bfloat16)}


@formula
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = RIGHT_DOWN_CAUSAL,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the keys with the highest scores of each query, int32, the highest first, and the scores if wanted.

    Behind the keys that a query sees stands -1. What lies behind the lengths of queries is -1, too, but in the layout
    TND, where nothing is written there, and nothing at all if no sequence has both a query and a key.
    """
    operator = "npu_lightning_indexer"
    _require_common(operator, layout_query, layout_key, block_table, sparse_mode, pre_tokens, next_tokens)
    _require_indexer(operator, query, key, weights)
    counts = sparse_count in range(1, 2049) or sparse_count in range(3072, 8193, 1024)
    require(counts, operator, f"sparse_count must be 1 to 2048, or 3072 to 8192 by 1024, got {sparse_count}")
    require_before((9, 0), sparse_count <= 2048, operator, f"sparse_count must be at most 2048, got {sparse_count}")
    shape = (*query.shape[:-2], 1, sparse_count)
    sequences = [*_sequences(operator, layout_query, query, key, actual_seq_lengths_query, actual_seq_lengths_key)]
    is_written = layout_query == "BSND" or any(len(query[q]) and len(key[k]) for q, k in sequences)
    indices = torch.full(shape, ABSENT if layout_query == "BSND" else UNWRITTEN, dtype=int32)
    values = torch.full(shape, -torch.inf if layout_query == "BSND" else torch.nan, dtype=query.dtype)
    for q, k in sequences if is_written else ():
        indices[q], values[q] = ABSENT, -torch.inf
        scores = _index_scores(query[q], key[k], weights[q])
        beyond = _beyond(scores.shape[0], scores.shape[1], sparse_mode)
        ordered = scores.masked_fill(beyond, -torch.inf).sort(dim=-1, descending=True, stable=True)
        chosen = ordered.indices.masked_fill(beyond.gather(-1, ordered.indices), ABSENT)[:, :sparse_count]
        indices[q][:, 0, : chosen.shape[1]] = chosen.to(int32)
        values[q][:, 0, : chosen.shape[1]] = ordered.values[:, :sparse_count].to(query.dtype)
    return indices, values if return_value else values.new_empty(0)


@formula
def npu_lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = RIGHT_DOWN_CAUSAL,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and weights from that of the scores of chosen keys."""
    operator = "npu_lightning_indexer_grad"
    _require_common(operator, layout, layout, None, sparse_mode, pre_tokens, next_tokens)
    _require_indexer(operator, query, key, weights)
    dq, dk, dw = (torch.zeros_like(tensor, dtype=float32) for tensor in (query, key, weights))
    for q, k in _sequences(operator, layout, query, key, actual_seq_lengths_query, actual_seq_lengths_key):
        chosen = sparse_indices[q][:, 0].long()
        absent, chosen = chosen == ABSENT, chosen.clamp(min=0)
        keys, queries = key[k][:, 0].float()[chosen], query[q].float()
        products = queries @ keys.mT
        dscores = dy[q].float().masked_fill(absent.unsqueeze(1), 0)
        dw[q] = (dscores * products.relu()).sum(-1)
        dproducts = (dscores * weights[q].float().unsqueeze(-1)).masked_fill(products <= 0, 0)
        dq[q] = dproducts @ keys
        dk[k][:, 0].index_add_(0, chosen.flatten(), (dproducts.mT @ queries).flatten(0, 1))
    return dq.to(query.dtype), dk.to(key.dtype), dw.to(weights.dtype)


@formula
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = RIGHT_DOWN_CAUSAL,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention of all heads to chosen keys of one head, and every row's maximum and sum if wanted.

    The indices of a query end before the first -1. A query without any, and what lies behind the lengths, is NaN.
    """
    operator = "npu_sparse_flash_attention"
    _require_common(operator, layout_query, layout_kv, block_table, sparse_mode, pre_tokens, next_tokens)
    ropes = _require_attention(operator, query, key, value, query_rope, key_rope, sparse_indices, attention_mode)
    require(sparse_block_size == 1, operator, "the software device has a sparse_block_size of 1")
    require(sinks is None, operator, "Atlas A2 and A3 take no sinks")
    out = torch.full_like(query, torch.nan)
    heads = query.shape[-2]
    maximum, total = (torch.full((*query.shape[:-2], heads), torch.nan) for _ in range(2))
    q_all, k_all = torch.cat((query, ropes[0]), -1), torch.cat((key, ropes[1]), -1)
    for q, k in _sequences(operator, layout_query, query, key, actual_seq_lengths_query, actual_seq_lengths_kv):
        scores, keys = _chosen_scores(operator, q_all[q], k_all[k], sparse_indices[q], scale_value, sparse_mode)
        weights = scores - scores.amax(-1, keepdim=True)
        weights = weights.exp().masked_fill(scores == -torch.inf, 0)
        maximum[q], total[q] = scores.amax(-1), weights.sum(-1)
        weights = (weights / total[q].unsqueeze(-1)).to(query.dtype).float()
        out[q] = (weights @ value[k][:, 0].float()[keys]).to(query.dtype)
    if not return_softmax_lse:
        return out, torch.empty(0), torch.empty(0)
    place = 1 if layout_query == "BSND" else 0
    return out, maximum.unsqueeze(place), total.unsqueeze(place)


@formula
def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = RIGHT_DOWN_CAUSAL,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    attention_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, and of the rotated parts: those of key and value are apart."""
    operator = "npu_sparse_flash_attention_grad"
    _require_common(operator, layout, layout, None, sparse_mode, pre_tokens, next_tokens)
    ropes = _require_attention(operator, query, key, value, query_rope, key_rope, sparse_indices, attention_mode)
    require(softmax_max.numel() > 0, operator, "softmax_max and softmax_sum are those of return_softmax_lse")
    q_all, k_all = torch.cat((query, ropes[0]), -1), torch.cat((key, ropes[1]), -1)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=float32) for tensor in (q_all, k_all, value))
    place = 1 if layout == "BSND" else 0
    maximum, total = softmax_max.squeeze(place), softmax_sum.squeeze(place)
    for q, k in _sequences(operator, layout, query, key, actual_seq_qlen, actual_seq_kvlen):
        scores, chosen = _chosen_scores(operator, q_all[q], k_all[k], sparse_indices[q], scale_value, sparse_mode)
        weights = (scores - maximum[q].unsqueeze(-1)).exp() / total[q].unsqueeze(-1)
        dout, flat = d_out[q].float(), chosen.flatten()
        dscores = dout @ value[k][:, 0].float()[chosen].mT - (dout * out[q].float()).sum(-1, keepdim=True)
        dscores = dscores * weights * scale_value
        dq[q] = dscores @ k_all[k][:, 0].float()[chosen]
        dk[k][:, 0].index_add_(0, flat, (dscores.mT @ q_all[q].float()).flatten(0, 1))
        dv[k][:, 0].index_add_(0, flat, (weights.mT @ dout).flatten(0, 1))
    (dq, dq_rope), (dk, dk_rope) = ([part.to(query.dtype) for part in d.split([LATENT, ROTARY], -1)] for d in (dq, dk))
    return dq, dk, dv.to(query.dtype), dq_rope, dk_rope


# ---- what is computed -----------------------------------------------------------------------------------------------
def _index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return ``[S, S_k]`` of ``[S, N, D]``, ``[S_k, 1, D]`` and ``[S, N]``."""
    scores = (query.float() @ key[:, 0].float().mT).relu()
    return (weights.float().unsqueeze(1) @ scores).squeeze(1)


def _chosen_scores(
    operator: str, query: Tensor, key: Tensor, indices: Tensor, scale: float, mode: int
) -> tuple[Tensor, Tensor]:
    """Return the scores of chosen keys, ``[S, N, k]``, -inf where there is none, and which keys they are."""
    absent = (indices[:, 0] == ABSENT).cumsum(-1) > 0  # from the first one on
    keys = indices[:, 0].long().masked_fill(absent, 0)
    inside = bool(((keys >= 0) & (keys < len(key))).all())
    require_values(inside, operator, f"sparse_indices must be below the {len(key)} keys of the sequence")
    keys = keys.clamp(0, len(key) - 1)
    scores = query.float() @ key[:, 0].float()[keys].mT * scale
    beyond = _beyond(len(query), len(key), mode).gather(-1, keys)
    scores = scores.masked_fill(beyond.unsqueeze(1), MASKED)
    return scores.masked_fill(absent.unsqueeze(1), -torch.inf), keys


def _beyond(queries: int, keys: int, mode: int) -> Tensor:
    """Mark the keys behind that of a query, the last one of which stands at the last key."""
    beyond = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return beyond if mode == RIGHT_DOWN_CAUSAL else torch.zeros_like(beyond)


def _sequences(
    operator: str, layout: str, query: Tensor, key: Tensor, lengths: Tensor | None, key_lengths: Tensor | None
) -> Iterator[tuple]:
    """Yield where the queries and the keys of each sequence are."""
    if layout == "BSND":
        sizes = [[query.shape[1]] * len(query) if lengths is None else lengths.tolist()]
        sizes += [[key.shape[1]] * len(key) if key_lengths is None else key_lengths.tolist()]
        fits = max(sizes[0]) <= query.shape[1] and max(sizes[1]) <= key.shape[1]
        require_values(fits, operator, "a sequence is longer than query or key")
        for row, (q, k) in enumerate(zip(*sizes)):
            yield (row, slice(0, q)), (row, slice(0, k))
        return
    require(lengths is not None and key_lengths is not None, operator, "the layout TND needs both lengths")
    ends, key_ends = ([0, *each.tolist()] for each in (lengths, key_lengths))  # type: ignore[union-attr]
    require(len(ends) == len(key_ends), operator, "there must be as many lengths of queries as of keys")
    in_turn = ends == sorted(ends) and key_ends == sorted(key_ends)
    rule = "lengths in the layout TND are sums of all so far, and no more than there are tokens"
    require_values(in_turn and ends[-1] <= len(query) and key_ends[-1] <= len(key), operator, rule)
    for i in range(len(ends) - 1):
        yield (slice(ends[i], ends[i + 1]),), (slice(key_ends[i], key_ends[i + 1]),)


# ---- what is accepted -----------------------------------------------------------------------------------------------
def _require_common(
    operator: str, layout: str, key_layout: str, table: Tensor | None, mode: int, before: int, behind: int
) -> None:
    if table is not None or key_layout == "PA_BSND":
        raise NotImplementedError(f"{operator}: the software device has no paged keys")
    require(layout in ("BSND", "TND"), operator, f"the layout must be BSND or TND, got {layout}")
    require(layout == key_layout, operator, "query and key must have one layout")
    require(mode in (ALL, RIGHT_DOWN_CAUSAL), operator, f"sparse_mode must be 0 or 3, got {mode}")
    require(before == behind == UNBOUNDED, operator, "pre_tokens and next_tokens must be 2^63 - 1")


def _require_indexer(operator: str, query: Tensor, key: Tensor, weights: Tensor) -> None:
    require_dtypes(operator, HALVES, query=query, key=key)
    require(weights.dtype in (query.dtype, float32), operator, "weights must be in the dtype of query, or float32")
    require_before((9, 0), weights.dtype == query.dtype, operator, "weights must be in the dtype of query")
    require_before((9, 0), query.shape[-2] == 64, operator, "query must have 64 heads")
    _require_heads(operator, INDEX_SIZE, query=query, key=key)
    require(query.shape[-2] <= 64, operator, f"query must have at most 64 heads, got {describe(query)}")
    require(weights.shape == query.shape[:-1], operator, f"weights must be {list(query.shape[:-1])}")
    require(weights.is_contiguous(), operator, "weights must be contiguous")


def _require_attention(
    operator: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    indices: Tensor,
    mode: int,
) -> tuple[Tensor, Tensor]:
    require(mode == 2, operator, f"attention_mode must be 2, got {mode}")
    if query_rope is None or key_rope is None:
        raise RuntimeError(f"{operator}: attention_mode 2 needs query_rope and key_rope")
    five = {"query": query, "key": key, "value": value, "query_rope": query_rope, "key_rope": key_rope}
    require_dtypes(operator, {(d,) * 5 for d in (float16, bfloat16)}, **five)
    require_dtypes(operator, {(int32,)}, sparse_indices=indices)
    heads = query.shape[-2]
    require(heads in (1, 2, 4, 8, 16, 32, 64, 128), operator, f"query must have 1, 2, 4 to 128 heads, got {heads}")
    require(value.shape == key.shape, operator, f"value must be as key, {list(key.shape)}, got {describe(value)}")
    _require_heads(operator, LATENT, query=query, key=key, value=value)
    _require_heads(operator, ROTARY, query_rope=query_rope, key_rope=key_rope)
    fits = indices.dim() == query.dim() and indices.shape[:-1] == (*query.shape[:-2], 1) and indices.is_contiguous()
    rule = f"sparse_indices must be {[*query.shape[:-2], 1]} and any number, contiguous"
    require(fits, operator, f"{rule}, got {describe(indices)}")
    return query_rope, key_rope


def _require_heads(operator: str, size: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        is_one = "query" in name or tensor.shape[-2] == 1
        require(is_one, operator, f"{name} must have one head, got {describe(tensor)}")
        require(tensor.shape[-1] == size, operator, f"{name} must have heads of {size}, got {describe(tensor)}")
        require(tensor.numel() > 0, operator, f"{name} is empty")
        require(tensor.is_contiguous(), operator, f"{name} must be contiguous")
