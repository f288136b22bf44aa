"""Attention, with heads, lengths and windows at and around the limits of the operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels_ext_npu.selftest.cases import Function, at_limits, drawn

SCALE = 0.25
HEADS = (2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)
CHOSEN = (0, 2, 4, 6, 8)  # of 13 keys, of which the first of nine queries sees five
LATENT_SCALE = 0.04
# queries, keys and values; limits: heads of up to 768 values, 256 heads, no block of 16 values a head
CAUSAL = {
    "one token": ((1, 1, 2, 16), (1, 1, 2, 16), (1, 1, 2, 16)),
    "a head of 7": ((1, 5, 2, 7), (1, 5, 1, 7), (1, 5, 1, 7)),
    "a head of 80": ((1, 9, 2, 80), (1, 9, 2, 80), (1, 9, 2, 80)),
    "a head of 192 and values of 128": ((1, 9, 2, 192), (1, 9, 2, 192), (1, 9, 2, 128)),
    "a head of 768": ((1, 5, 1, 768), (1, 5, 1, 768), (1, 5, 1, 768)),
    "a head of 776": ((1, 5, 1, 776), (1, 5, 1, 776), (1, 5, 1, 776)),
    "256 heads": ((1, 2, 256, 16), (1, 2, 8, 16), (1, 2, 8, 16)),
    "257 heads": ((1, 2, 257, 16), (1, 2, 1, 16), (1, 2, 1, 16)),
    "one query behind 600 keys": ((1, 1, 2, 16), (1, 600, 1, 16), (1, 600, 1, 16)),
    "more queries than keys": ((1, 9, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16)),
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute ``[B, S_q, N, D_v]`` of ``[B, S, N, D]`` in float64; a query that sees no key gives zeros.

    There is a score for every query and key, from flash-attn's description of its parameters.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    at = torch.arange(q.shape[2]).unsqueeze(1) + k.shape[2] - q.shape[2]  # the last query stands at the last key
    ahead = torch.arange(k.shape[2]) - at
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.double().view(-1, q.shape[1], 1, 1) * ahead.abs()
    scores = scores.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]] * seen
    return (weights @ v).transpose(1, 2)


def packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], key_lengths: list[int], scale: float, **options: Any
) -> Tensor:
    """Compute ``[T, N, D_v]`` of sequences that lie one behind the other."""
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths))
    slopes = options.pop("slopes", None)
    found = []
    for i, part in enumerate(parts):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[i]
        one, keys, values = (t.unsqueeze(0) for t in part)
        found.append(attention(one, keys, values, scale, slopes=own, **options)[0])
    return torch.cat(found)


def _in_a_graph(f: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of packed sequences whose lengths a compiled graph reads when it runs."""
    ends = torch.tensor([0, 5, 12], device=q.device)

    def in_a_row(*tensors: Tensor) -> Tensor:
        return f(*tensors, ends, ends, softmax_scale=SCALE, causal=True)

    return torch.compile(in_a_row, backend="aot_eager")(q, k, v)


def _attend(forward: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module = SimpleNamespace(is_causal=True)  # all that it reads of the one that calls it
    return forward(module, *(t.transpose(1, 2) for t in (q, k, v)), None)[0]


def _attend_latents(
    forward: Callable, q: Tensor, latents: Tensor, q_rope: Tensor, rope: Tensor, padding: range
) -> Tensor:
    """Attend to latents ``[B, S_k, R]`` as to one key head, with the rotated parts of queries and latents beside."""
    key, rope = latents.unsqueeze(1), rope.unsqueeze(1)
    rotated, mask = (q_rope.transpose(1, 2), rope), _causal_mask(forward, q, latents, padding)
    module = SimpleNamespace(is_causal=True)
    return forward(module, q.transpose(1, 2), key, key, mask, scaling=LATENT_SCALE, rotated=rotated)[0]


def _exact_of_latents(q: Tensor, latents: Tensor, q_rope: Tensor, rope: Tensor, padding: range) -> Tensor:
    scores = torch.einsum("bqnd,bkd->bqnk", torch.cat((q, q_rope), -1), torch.cat((latents, rope), -1)) * LATENT_SCALE
    scores = scores.masked_fill(~_seen(q, latents, padding).unsqueeze(1), -torch.inf)
    return torch.einsum("bqnk,bkr->bqnr", scores.softmax(-1), latents)


def _masked(kernel_mask: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the description says, as a mask, is what the attention of torch leaves out."""
    mask = kernel_mask(q.shape[0], q.shape[1], k.shape[1], device=q.device)[:]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    scores = (q @ k.mT * SCALE).masked_fill(~mask, -torch.inf)
    return (scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def _causal_mask(f: Callable, queries: Tensor, keys: Tensor, padding: range = range(0)) -> Any:
    """Describe the mask of the last queries among all keys, of which some are padding, by a function's package."""
    package = sys.modules[f.__module__.partition(".")[0]]
    (batch, count), among, device = queries.shape[:2], keys.shape[1], queries.device
    kept = _kept(keys, padding).expand(batch, -1).to(device) if padding else None
    return package.attention_mask(batch, count, among, q_offset=among - count, attention_mask=kept, device=device)


def _sums_of_chosen(f: Callable, q: Tensor, k: Tensor, w: Tensor, padding: range = range(0)) -> Tensor:
    """Add up the keys that an indexer chooses for each query among those that it sees."""
    return _sums(f(q, k, w, _causal_mask(f, q, k, padding), len(CHOSEN)), k, _seen(q, k, padding))


def _exact_sums_of_chosen(q: Tensor, k: Tensor, w: Tensor, padding: range = range(0)) -> Tensor:
    scores = torch.einsum("bqh,bqhk->bqk", w, torch.einsum("bqhd,bkd->bqhk", q, k).relu())
    seen = _seen(q, k, padding)
    return _sums(scores.masked_fill(~seen, -torch.inf).topk(len(CHOSEN)).indices, k, seen)


def _sums(indices: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    chosen = torch.zeros(*indices.shape[:2], k.shape[1], dtype=k.dtype, device=k.device)
    return chosen.scatter(-1, indices.long(), 1.0).mul(seen.to(k.device)) @ k


def _seen(q: Tensor, k: Tensor, padding: range = range(0)) -> Tensor:
    causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return causal & _kept(k, padding)


def _kept(k: Tensor, padding: range) -> Tensor:
    return torch.tensor([place not in padding for place in range(k.shape[1])])


def _to_chosen(f: Callable, q: Tensor, latents: Tensor, rope: Tensor) -> Tensor:
    indices = torch.tensor(CHOSEN, dtype=torch.int32, device=q.device).expand(*q.shape[:2], -1)
    return f(q, latents, rope, indices, _causal_mask(f, q, latents), LATENT_SCALE)


def _exact_to_chosen(q: Tensor, latents: Tensor, rope: Tensor) -> Tensor:
    scores = torch.einsum("bqnd,bkd->bqnk", q, torch.cat((latents, rope), -1)) * LATENT_SCALE
    chosen = torch.zeros(latents.shape[1], dtype=torch.bool).index_fill(0, torch.tensor(CHOSEN), True)
    scores = scores.masked_fill(~(_seen(q, latents) & chosen).unsqueeze(1), -torch.inf)
    return torch.einsum("bqnk,bkr->bqnr", scores.softmax(-1), latents)


def _indexer_loss(f: Callable, q: Tensor, k: Tensor, *indexer: Tensor) -> Tensor:
    """Compute the loss of an indexer that has chosen all keys."""
    indices = torch.arange(k.shape[1], dtype=torch.int32, device=q.device).expand(*q.shape[:2], -1)
    return f(q, k, *indexer, _causal_mask(f, q, k), LATENT_SCALE, indices, LATENT_SCALE)


def _exact_indexer_loss(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, w: Tensor) -> Tensor:
    hidden = ~_seen(q, k)
    paid = torch.einsum("bqnd,bkd->bnqk", q, k.squeeze(2)) * LATENT_SCALE
    paid = paid.masked_fill(hidden, -torch.inf).softmax(-1).mean(1).detach()
    scores = torch.einsum("bqhd,bkd->bqhk", index_q, index_k).mul(LATENT_SCALE).relu()
    log = torch.einsum("bqh,bqhk->bqk", w, scores).masked_fill(hidden, -torch.inf).log_softmax(-1)
    return torch.nn.functional.kl_div(log.masked_fill(hidden, 0), paid, reduction="sum")


_function = partial(Function, "FlashAttention")
_causal = partial(attention, scale=SCALE, causal=True)
_packed = partial(packed, lengths=[5, 7], key_lengths=[5, 7], scale=SCALE, causal=True)
FUNCTIONS = (
    _function(
        "flash_attn_func",
        lambda f, q, k, v, s: f(q, k, v, causal=True, window_size=(3, 0), s_aux=s),
        lambda q, k, v, s: attention(q, k, v, SCALE, True, (3, 0), sinks=s),
        drawn(*HEADS, (4,)),
    ),
    *at_limits(
        "FlashAttention",
        "flash_attn_func",
        lambda f, *t: f(*t, causal=True),
        lambda q, k, v: attention(q, k, v, q.shape[-1] ** -0.5, True),
        CAUSAL,
    ),
    _function(
        "flash_attn_func",
        lambda f, *t: f(*t, softmax_scale=SCALE, softcap=3.0),
        partial(attention, scale=SCALE, softcap=3.0),
        drawn(*HEADS),
        "a softcap",
    ),
    _function(
        "flash_attn_varlen_func",
        lambda f, *t: f(*t, [0, 5, 12], [0, 5, 12], softmax_scale=SCALE, causal=True),
        _packed,
        drawn((12, 4, 16), (12, 2, 16), (12, 2, 16)),
    ),
    _function(
        "flash_attn_varlen_func", _in_a_graph, _packed, drawn((12, 4, 16), (12, 2, 16), (12, 2, 16)), "in a graph"
    ),
    _function("top_k_keys", _sums_of_chosen, _exact_sums_of_chosen, drawn((1, 9, 16, 128), (1, 13, 128), (1, 9, 16))),
    *(
        _function(
            "top_k_keys",
            partial(_sums_of_chosen, padding=padding),
            partial(_exact_sums_of_chosen, padding=padding),
            drawn((rows, queries, 16, 128), (rows, 13, 128), (rows, queries, 16)),
            f"padding {where}",
        )
        for rows, queries, padding, where in (
            (1, 13, range(3), "before a prompt"),
            (2, 1, range(3), "before one token"),
            (2, 1, range(2, 5), "between keys of one token"),
        )
    ),
    _function("attend_chosen", _to_chosen, _exact_to_chosen, drawn((1, 9, 4, 576), (1, 13, 512), (1, 13, 64))),
    _function(
        "indexer_loss",
        _indexer_loss,
        _exact_indexer_loss,
        drawn((1, 9, 32, 576), (1, 13, 1, 576), (1, 9, 8, 128), (1, 13, 128), (1, 9, 8)),
    ),
    _function("attention_forward", _attend, _causal, drawn(*HEADS)),
    *(
        _function(
            "attention_forward",
            partial(_attend_latents, padding=padding),
            partial(_exact_of_latents, padding=padding),
            drawn((2, 1, 4, 512), (2, 600, 512), (2, 1, 4, 64), (2, 600, 64)),
            f"one token behind 600 latents{beside}",
        )
        for padding, beside in ((range(0), ""), (range(540), " with padding"))
    ),
    _function("attention_mask", _masked, _causal, drawn(*HEADS)),
)
