"""The attention that transformers calls, by the contract of its ``AttentionInterface``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention_spec import CAUSAL, FULL, Band, Options, Sequences
from .dispatch import attend, attend_packed
from .masks.caller_masks import described, of_the_caller
from .masks.mask_description import MaskDescription
from .masks.mask_interface import is_without_padding
from .ops.decoding import Rotated, decode_latents, is_decoding_latents
from .ops.limits import of_one_dtype
from .sparse.sparse_attention import left_out_beside
from .varlen.cu_seqlens import ends_of, in_other_sequences, sequences_of
from .varlen.varlen_batch import Packing
from .varlen.varlen_compile import attend_packed_in_graph, stays_whole


class _Lengths(NamedTuple):
    """Holds what the caller says of sequences, ``[1 + sequences]`` each, and which of its keys a query sees."""

    of_queries: Tensor
    of_keys: Tensor
    band: Band


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskDescription | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    cache: Any = None,
    indices: Tensor | None = None,
    rotated: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a module of transformers.

    Args:
        module: whose attention it is; its ``is_causal`` counts where nothing else says so.
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``, where ``N`` is a multiple of ``N_k``.
        value: ``[B, N_k, S_k, D_v]``.
        attention_mask: what ``attention_mask`` of this package returned; a mask of the caller, bool
            ``[B or 1, N or 1, S_q, S_k]``, True where a query sees a key, or floating and added to the scores; padding,
            ``[B, S_k]``; or None: causal or full, as the module is.
        dropout: which part of the weights is dropped.
        scaling: the factor of the scores, by default ``1 / sqrt(D)``.
        sliding_window: of how many keys a query sees the last, itself included, where ``attention_mask`` is None; in
            both directions where it is not causal.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        is_causal: whether a query sees no key behind its own, where ``attention_mask`` does not say so.
        s_aux: ``[N]``, sinks.
        position_bias: ``[B or 1, N, S_q, S_k]``, added to the scores.
        cu_seq_lens_q: ``[1 + sequences]``, of packed sequences in a batch of one.
        cu_seq_lens_k: the same for the keys; with a paged cache by type of layer.
        cache: the paged cache of continuous batching, where the module leaves it to its attention to read that.
        indices: ``[B, S_q, k]``, the keys that a query sees of those that the mask leaves it, each once; all of them
            where they are as many as there are keys.
        rotated: ``[B, N, S_q, R_r]`` and ``[B, N_k, S_k, R_r]``, the rest of each query and key: of latents the part
            that is rotated, which lies apart from them in a cache. ``scaling`` has to be given with it.
        kwargs: what other implementations take, and where a paged cache reads and writes.

    Returns:
        ``[B, S_q, N, D_v]``, contiguous, and None: the weights are never in memory.

    Raises:
        ValueError: an argument says of the keys what is not computed here, or shapes, dtypes or devices do not fit.
        TypeError: query, key and value are not floating point.
    """
    if kwargs.get("block_indices") is not None:
        raise ValueError("attention_forward: block_indices are not supported, choose the implementation 'sdpa'")
    if cache is not None:
        kwargs["cu_seq_lens_k"] = cu_seq_lens_k
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        cu_seq_lens_k = kwargs["cu_seq_lens_k"]
    is_paged = cache is not None or "read_index" in kwargs  # the model itself reads pages from transformers 5.24 on
    query, key, value = of_one_dtype(query, key, value)
    _check(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    band = _band(query, key, causal, sliding_window)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        attention_mask = described(attention_mask, query.shape[2], key.shape[2], band)
    seen: Band | Packing | _Lengths | Tensor
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    if packed and _says_no_more_than_distances(attention_mask):
        band = band if attention_mask is None else attention_mask.pattern.band
        seen = _Lengths(cu_seq_lens_q, cu_seq_lens_k, band)
    elif isinstance(attention_mask, MaskDescription):
        seen = _seen(attention_mask, query, key)
        if attention_mask.is_of_module and seen == CAUSAL and query.shape[2] == key.shape[2]:
            seen = CAUSAL if is_causal or getattr(module, "is_causal", True) else FULL
        if position_bias is not None and isinstance(seen, Packing):  # a bias is for the batch as it lies, with padding
            seen = attention_mask.left_out(query.device)
        if packed and not is_paged and is_without_padding(attention_mask):  # that of a paged cache knows them
            beside = attention_mask.left_out_beside(cu_seq_lens_q, cu_seq_lens_k, query.shape[0], query.device)
            seen = beside[..., : key.shape[2]]
    elif attention_mask is not None:
        seen, added = of_the_caller(attention_mask, query, key)
        if added is not None:
            position_bias = added if position_bias is None else position_bias + added
        if packed and not is_paged and is_without_padding(attention_mask):
            sizes = query.shape[0], query.shape[2], key.shape[2]
            others = in_other_sequences(*sizes, cu_seq_lens_q, cu_seq_lens_k, query.device)
            seen = seen | others if isinstance(seen, Tensor) else others
    else:
        seen = band
    options = Options(scale, dropout, s_aux, softcap or 0.0, bias=position_bias)
    are_chosen = indices is not None and indices.shape[-1] < key.shape[2]
    if rotated is not None:
        rest = Rotated(*of_one_dtype(*rotated))
        _check_rotated(rest, query, key)
        if not are_chosen and is_decoding_latents(query, key, value, rest, seen, options):
            return decode_latents(query, key, rest, seen, options), None
        query, key = (torch.cat(parts, dim=-1) for parts in ((query, rest.query), (key, rest.key)))
    if are_chosen:
        return _attend_chosen(query, key, value, indices, seen, attention_mask, options), None
    if isinstance(seen, (Packing, _Lengths)):
        return _attend_packing(query, key, value, seen, options), None
    return attend(query, key, value, seen, options), None


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise what :func:`attention_forward` says of tensors that do not fit."""
    fits = (
        query.dim() == key.dim() == 4
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3] > 0
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
    )
    if not fits:
        shapes = [list(tensor.shape) for tensor in (query, key, value)]
        raise ValueError(
            "attention_forward: query [B, N, S_q, D], key [B, N_k, S_k, D] and value [B, N_k, S_k, D_v] have to fit, "
            f"with N a multiple of N_k, got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if not query.is_floating_point():
        raise TypeError(f"attention_forward: query must be floating point, got {query.dtype}")
    if not (query.dtype is key.dtype is value.dtype and query.device == key.device == value.device):
        found = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in (query, key, value))
        raise ValueError(f"attention_forward: query, key and value must have one dtype and device, got {found}")


def _check_rotated(rotated: Rotated, query: Tensor, key: Tensor) -> None:
    """Raise what :func:`attention_forward` says of a rotated part that is not one of its query and key."""
    pairs = (rotated.query, query), (rotated.key, key)
    like = all(t.shape[:-1] == of.shape[:-1] and (t.dtype, t.device) == (of.dtype, of.device) for t, of in pairs)
    if not like or rotated.query.shape[-1] != rotated.key.shape[-1]:
        found = " and ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in rotated)
        raise ValueError(f"attention_forward: rotated must be the rest of each query and key, got {found}")


def _band(query: Tensor, key: Tensor, causal: bool, sliding_window: int | None) -> Band:
    """Return which keys a query sees where no mask says so.

    A window is in both directions as flash attention has it: transformers 5.22.2, modeling_flash_attention_utils.py,
    ``_process_flash_attention_kwargs``.
    """
    if sliding_window is None or key.shape[2] <= sliding_window:
        return CAUSAL if causal else FULL
    return Band(sliding_window - 1, 0 if causal else sliding_window - 1)


def _says_no_more_than_distances(mask: MaskDescription | Tensor | None) -> bool:
    """Tell whether the lengths of the caller say more than a mask: what is packed is in both, read once here."""
    return mask is None or (isinstance(mask, MaskDescription) and mask.is_band())


def _seen(mask: MaskDescription, query: Tensor, key: Tensor) -> Band | Packing | Tensor:
    """Return what a description says of a layer, whose cache can be shorter than those it was made for."""
    queries, keys = query.shape[2], key.shape[2]
    if (queries, keys) == (mask.queries, mask.keys):
        plain = mask.plain(query.shape[0])
        return mask.left_out(query.device) if plain is None else plain
    if not mask.fits(queries, keys):
        raise ValueError(
            f"attention_forward: attention_mask is for {mask.queries} queries and {mask.keys} keys, "
            f"got {queries} and {keys}"
        )
    if queries == mask.queries == mask.keys == 1:  # of a model whose cache counts no tokens: one key stands for all
        return FULL if mask.is_band() else mask.left_out(query.device)
    return mask.left_out(query.device)[..., :keys]


def _attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    seen: Band | Packing | _Lengths | Tensor,
    mask: Any,
    options: Options,
) -> Tensor:
    """Compute attention where a query sees chosen keys only, as DeepSeek-V3.2's indexer chooses them."""
    sequences = None
    if isinstance(seen, _Lengths):
        batch, queries, keys = len(query), query.shape[2], key.shape[2]
        if queries != keys:
            raise ValueError("attention_forward: indices of keys in a cache are not computed by sequence")
        of_queries = sequences_of(batch, queries, seen.of_queries, query.device)
        sequences = of_queries, sequences_of(batch, keys, seen.of_keys, query.device)
        seen = seen.band
    parts = []
    for rows, left_out in left_out_beside(indices, seen, mask, key.shape[2], sequences):
        of_rows = options if options.bias is None else replace(options, bias=options.bias[..., rows, :])
        parts.append(attend(query[:, :, rows], key, value, left_out, of_rows))
    return torch.cat(parts, dim=1)


def _attend_packing(query: Tensor, key: Tensor, value: Tensor, packing: Packing | _Lengths, options: Options) -> Tensor:
    """Compute attention within the sequences of a batch, and zero for the tokens that are in none."""
    batch, _, queries, _ = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if isinstance(packing, _Lengths):
        if stays_whole(query, key, value, packing.of_queries, packing.of_keys, packing.band, options):
            result = attend_packed_in_graph(query, key, value, packing.of_queries, packing.band, options)
            return result.unflatten(0, (batch, queries))
        packing = Packing(Sequences(ends_of(packing.of_queries), ends_of(packing.of_keys)), packing.band)
    total, (queries_seen, keys_seen) = query.shape[0], packing.places(query.device)
    if queries_seen is not None:
        query = query.index_select(0, queries_seen)
    if keys_seen is not None:
        key, value = key.index_select(0, keys_seen), value.index_select(0, keys_seen)
    left_out = packing.left_out(query.device)
    result = attend_packed(query, key, value, packing.sequences, packing.band, options, left_out)
    if queries_seen is not None:
        result = result.new_zeros(total, *result.shape[1:]).index_copy(0, queries_seen, result)
    return result.unflatten(0, (batch, queries))
