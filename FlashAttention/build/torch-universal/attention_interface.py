"""The attention that transformers calls, by the contract of its ``AttentionInterface``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention_spec import CAUSAL, FULL, AttentionSpec, Band, SequenceEnds
from .dispatch import attend, attend_varlen
from .masks.caller_masks import describe_padding, split_caller_mask
from .masks.mask_description import MaskDescription
from .masks.mask_interface import is_without_padding
from .ops.decoding import RotaryPart, decode, is_decoding_mla
from .ops.limits import in_autocast_dtype
from .sparse.sparse_attention import masked_out_unchosen
from .varlen.cu_seqlens import cross_sequence_mask, sequence_ends, sequence_indices
from .varlen.varlen_batch import VarlenBatch
from .varlen.varlen_compile import attend_varlen_compiled, is_compiled_whole


class _CuSeqlens(NamedTuple):
    """Holds the cumulative lengths that a caller gives, ``[1 + sequences]``, and the band within each sequence."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
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
        module: the attention module; its ``is_causal`` counts where no argument says whether attention is causal.
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``, where ``N`` is a multiple of ``N_k``.
        value: ``[B, N_k, S_k, D_v]``.
        attention_mask: what ``attention_mask`` of this package returned; a mask of the caller, bool
            ``[B or 1, N or 1, S_q, S_k]``, True where a query sees a key, or floating and added to the scores; padding,
            ``[B, S_k]``; or None: causal or full, as the module is.
        dropout: the probability with which a weight is dropped.
        scaling: the factor of the scores, by default ``1 / sqrt(D)``.
        sliding_window: how many keys a query sees, its own included, where ``attention_mask`` is None; as many behind
            it where attention is not causal.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        is_causal: whether a query sees no key behind its own, where ``attention_mask`` leaves it open.
        s_aux: ``[N]``, sinks.
        position_bias: ``[B or 1, N, S_q, S_k]``, added to the scores.
        cu_seq_lens_q: ``[1 + sequences]``, of packed sequences in a batch of one.
        cu_seq_lens_k: the same for the keys; with a paged cache by type of layer.
        cache: the paged cache of continuous batching, where the module leaves it to its attention to read it.
        indices: ``[B, S_q, k]``, distinct keys that an indexer chose: of these a query sees those that the mask allows.
            They count where they are fewer than the keys.
        rotated: ``[B, N, S_q, R_r]`` and ``[B, N_k, S_k, R_r]``, a further part of each query and key: that of MLA with
            rotary positions, which a cache holds apart from latents. ``scaling`` has to be given with it.
        kwargs: arguments of other implementations, and the indices at which a paged cache is read and written.

    Returns:
        ``[B, S_q, N, D_v]``, contiguous, and None: the weights are never in memory.

    Raises:
        ValueError: an argument is not supported, or shapes, dtypes or devices do not fit.
        TypeError: query, key and value are not floating point.
    """
    if kwargs.get("block_indices") is not None:
        raise ValueError("attention_forward: block_indices are not supported, choose the implementation 'sdpa'")
    if cache is not None:
        kwargs["cu_seq_lens_k"] = cu_seq_lens_k
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        cu_seq_lens_k = kwargs["cu_seq_lens_k"]
    is_paged = cache is not None or "read_index" in kwargs  # the model itself reads pages from transformers 5.24 on
    query, key, value = in_autocast_dtype(query, key, value)
    _check(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    band = _band(query, key, causal, sliding_window)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        attention_mask = describe_padding(attention_mask, query.shape[2], key.shape[2], band)
    masking: Band | VarlenBatch | _CuSeqlens | Tensor
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    if packed and _is_band_within_sequences(attention_mask):
        band = band if attention_mask is None else attention_mask.structure.band
        masking = _CuSeqlens(cu_seq_lens_q, cu_seq_lens_k, band)
    elif isinstance(attention_mask, MaskDescription):
        masking = _describe_layer(attention_mask, query, key)
        if attention_mask.defers_to_is_causal and masking == CAUSAL and query.shape[2] == key.shape[2]:
            masking = CAUSAL if is_causal or getattr(module, "is_causal", True) else FULL
        if position_bias is not None and isinstance(masking, VarlenBatch):  # the bias is for the batch with its padding
            masking = attention_mask.masked_out(query.device)
        if packed and not is_paged and is_without_padding(attention_mask):  # the mask of a paged cache includes lengths
            across = attention_mask.masked_out_across_sequences(
                cu_seq_lens_q, cu_seq_lens_k, query.shape[0], query.device
            )
            masking = across[..., : key.shape[2]]
    elif attention_mask is not None:
        masking, mask_bias = split_caller_mask(attention_mask, query, key)
        if mask_bias is not None:
            position_bias = mask_bias if position_bias is None else position_bias + mask_bias
        if packed and not is_paged and is_without_padding(attention_mask):
            sizes = query.shape[0], query.shape[2], key.shape[2]
            others = cross_sequence_mask(*sizes, cu_seq_lens_q, cu_seq_lens_k, query.device)
            masking = masking | others if isinstance(masking, Tensor) else others
    else:
        masking = band
    spec = AttentionSpec(scale, dropout, s_aux, softcap or 0.0, bias=position_bias)
    is_sparse = indices is not None and indices.shape[-1] < key.shape[2]
    if rotated is not None:
        rotary = RotaryPart(*in_autocast_dtype(*rotated))
        _check_rotated(rotary, query, key)
        if not is_sparse and is_decoding_mla(query, key, value, rotary, masking, spec):
            return decode(query, key, value, spec, rotary, masking), None
        query, key = (torch.cat(parts, dim=-1) for parts in ((query, rotary.query), (key, rotary.key)))
    if is_sparse:
        return _attend_chosen(query, key, value, indices, masking, attention_mask, spec), None
    if isinstance(masking, (VarlenBatch, _CuSeqlens)):
        return _attend_varlen_batch(query, key, value, masking, spec), None
    return attend(query, key, value, masking, spec), None


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


def _check_rotated(rotated: RotaryPart, query: Tensor, key: Tensor) -> None:
    """Raise what :func:`attention_forward` says of a rotated part that does not fit its query and key."""
    pairs = (rotated.query, query), (rotated.key, key)
    fits = all(t.shape[:-1] == whole.shape[:-1] for t, whole in pairs)
    fits = fits and all((t.dtype, t.device) == (whole.dtype, whole.device) for t, whole in pairs)
    if not fits or rotated.query.shape[-1] != rotated.key.shape[-1]:
        found = " and ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in rotated)
        raise ValueError(f"attention_forward: rotated must be the rest of each query and key, got {found}")


def _band(query: Tensor, key: Tensor, causal: bool, sliding_window: int | None) -> Band:
    """Return which keys a query sees without a mask.

    A window that is not causal is in both directions, as with flash attention in transformers 5.22.2,
    modeling_flash_attention_utils.py, ``_process_flash_attention_kwargs``.
    """
    if sliding_window is None or key.shape[2] <= sliding_window:
        return CAUSAL if causal else FULL
    return Band(sliding_window - 1, 0 if causal else sliding_window - 1)


def _is_band_within_sequences(mask: MaskDescription | Tensor | None) -> bool:
    """Tell whether ``cu_seqlens`` and a band say all that a mask does, so that the host need not read the mask."""
    return mask is None or (isinstance(mask, MaskDescription) and mask.is_band_within_sequences())


def _describe_layer(mask: MaskDescription, query: Tensor, key: Tensor) -> Band | VarlenBatch | Tensor:
    """Return a description in the form in which attention is computed, for the keys that this layer's cache holds.

    A layer may hold fewer keys than the mask was made for.
    """
    queries, keys = query.shape[2], key.shape[2]
    if (queries, keys) == (mask.queries, mask.keys):
        band_or_varlen = mask.band_or_varlen(query.shape[0])
        return mask.masked_out(query.device) if band_or_varlen is None else band_or_varlen
    if not mask.fits(queries, keys):
        raise ValueError(
            f"attention_forward: attention_mask is for {mask.queries} queries and {mask.keys} keys, "
            f"got {queries} and {keys}"
        )
    if queries == mask.queries == mask.keys == 1:  # the model's cache counts no tokens: one key stands for all
        return FULL if mask.is_band_within_sequences() else mask.masked_out(query.device)
    return mask.masked_out(query.device)[..., :keys]


def _attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    masking: Band | VarlenBatch | _CuSeqlens | Tensor,
    mask: Any,
    spec: AttentionSpec,
) -> Tensor:
    """Compute attention in which a query sees only chosen keys, as those of DeepSeek-V3.2's indexer."""
    sequences = None
    if isinstance(masking, _CuSeqlens):
        batch, queries, keys = len(query), query.shape[2], key.shape[2]
        if queries != keys:
            raise ValueError("attention_forward: indices of keys in a cache are not computed by sequence")
        query_sequences = sequence_indices(batch, queries, masking.cu_seqlens_q, query.device)
        sequences = query_sequences, sequence_indices(batch, keys, masking.cu_seqlens_k, query.device)
        masking = masking.band
    parts = []
    for block, masked_out in masked_out_unchosen(indices, masking, mask, key.shape[2], sequences):
        block_spec = spec if spec.bias is None else replace(spec, bias=spec.bias[..., block, :])
        parts.append(attend(query[:, :, block], key, value, masked_out, block_spec))
    return torch.cat(parts, dim=1)


def _attend_varlen_batch(
    query: Tensor, key: Tensor, value: Tensor, varlen: VarlenBatch | _CuSeqlens, spec: AttentionSpec
) -> Tensor:
    """Compute attention within packed sequences, and zero for tokens that are not packed."""
    batch, _, queries, _ = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if isinstance(varlen, _CuSeqlens):
        if is_compiled_whole(query, key, value, varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.band, spec):
            result = attend_varlen_compiled(query, key, value, varlen.cu_seqlens_q, varlen.band, spec)
            return result.unflatten(0, (batch, queries))
        ends = SequenceEnds(sequence_ends(varlen.cu_seqlens_q), sequence_ends(varlen.cu_seqlens_k))
        varlen = VarlenBatch(ends, varlen.band)
    total, (query_indices, key_indices) = query.shape[0], varlen.token_indices(query.device)
    if query_indices is not None:
        query = query.index_select(0, query_indices)
    if key_indices is not None:
        key, value = key.index_select(0, key_indices), value.index_select(0, key_indices)
    masked_out = varlen.masked_out(query.device)
    result = attend_varlen(query, key, value, varlen.sequences, varlen.band, spec, masked_out)
    if query_indices is not None:
        result = result.new_zeros(total, *result.shape[1:]).index_copy(0, query_indices, result)
    return result.unflatten(0, (batch, queries))
