"""Attention as functions of tensors, with the parameters and the meaning of the package flash-attn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .attention_spec import AttentionSpec, Band, SequenceEnds
from .dispatch import attend, attend_varlen
from .ops.limits import INTEGERS
from .varlen.cu_seqlens import ends_from_list, require_ends_within, sequence_ends
from .varlen.varlen_compile import attend_varlen_compiled, is_compiled_whole


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Compute ``softmax(scale · q·kᵀ)·v``, as ``flash_attn_func`` of flash-attn 2.8 does.

    It is one launch of ``npu_fusion_attention`` for float16, bfloat16 and float32 with up to 256 heads of up to 768
    values. With softcap or ALiBi, which the operator does not have, on other devices and in other dtypes it is computed
    in torch, with all scores in memory. It is differentiable, and without dropout a second time, again with all scores
    in memory. A query that sees no key gives zero.

    Args:
        q: ``[B, S_q, N, D]``, of a floating dtype.
        k: ``[B, S_k, N_k, D]``, where ``N`` is a multiple of ``N_k``.
        v: ``[B, S_k, N_k, D_v]``.
        dropout_p: the probability with which a weight is dropped.
        softmax_scale: the factor of the scores, by default ``1 / sqrt(D)``.
        causal: whether a query sees no key behind its own. The last query stands at the last key.
        window_size: how many keys before and behind its own a query sees; -1 for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; 0 for none.
        alibi_slopes: ``[N]`` or ``[B, N]``: ``-slope · |i + S_k - S_q - j|`` is added to the score of i and j.
        deterministic: whether gradients have to be the same, bit for bit, in every run.
        return_attn_probs: only False.
        s_aux: ``[N]``, sinks: one more score for each query of a head, whose value is zero.

    Returns:
        ``[B, S_q, N, D_v]``, in the dtype of ``q``.

    Raises:
        ValueError: shapes, devices or dtypes do not fit, or the weights are asked for.
        TypeError: a tensor is not floating point.
        NotImplementedError: a gradient with dropout is differentiated.
    """
    name = "flash_attn_func"
    _refuse_weights(name, return_attn_probs)
    check_inputs(name, q, k, v, 4)
    spec = _attention_spec(name, q, dropout_p, softmax_scale, softcap, alibi_slopes, deterministic, s_aux)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{name}: q, k and v must have one batch size, got {q.shape[0]} and {k.shape[0]}")
    return attend(*(tensor.transpose(1, 2) for tensor in (q, k, v)), to_band(causal, window_size), spec)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Compute attention within each sequence of a packed batch, as ``flash_attn_varlen_func`` of flash-attn 2.8 does.

    What is said of :func:`flash_attn_func` holds for each sequence. The operator wants the lengths on the host: those
    on the NPU are read once for all calls with the same tensor, those on the CPU and in a list cost nothing. A graph
    of torch.compile stays whole where ``cu_seqlens_k`` is the very tensor that ``cu_seqlens_q`` is.

    Args:
        q: ``[T_q, N, D]``, the sequences one behind the other.
        k: ``[T_k, N_k, D]``.
        v: ``[T_k, N_k, D_v]``.
        cu_seqlens_q: ``[1 + sequences]``, where each sequence of ``q`` begins, and the end of the last one.
        cu_seqlens_k: the same of ``k`` and ``v``.
        max_seqlen_q: the longest sequence of ``q``; not needed here.
        max_seqlen_k: the longest sequence of ``k``; not needed here.
        dropout_p: as there, like all that follow.
        alibi_slopes: ``[N]`` or ``[sequences, N]``.
        block_table: only None: keys and values have to lie one behind the other.

    Returns:
        ``[T_q, N, D_v]``, in the dtype of ``q``; zero behind the last sequence.

    Raises:
        ValueError: shapes, devices, dtypes or lengths do not fit, or weights or paged keys are asked for.
        TypeError: a tensor is not floating point.
        NotImplementedError: a gradient with dropout is differentiated.
    """
    name = "flash_attn_varlen_func"
    _refuse_weights(name, return_attn_probs)
    if block_table is not None:
        raise ValueError(f"{name}: block_table must be None, paged keys and values are not supported")
    check_inputs(name, q, k, v, 3)
    spec = _attention_spec(name, q, dropout_p, softmax_scale, softcap, alibi_slopes, deterministic, s_aux)
    band = to_band(causal, window_size)
    if isinstance(cu_seqlens_q, Tensor) and is_compiled_whole(q, k, v, cu_seqlens_q, cu_seqlens_k, band, spec):
        return attend_varlen_compiled(q, k, v, cu_seqlens_q, band, spec)
    return attend_varlen(q, k, v, read_sequences(name, q, k, cu_seqlens_q, cu_seqlens_k), band, spec)


def read_sequences(
    name: str, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | Sequence[int], cu_seqlens_k: Tensor | Sequence[int]
) -> SequenceEnds:
    """Return where packed sequences end, and raise what the function ``name`` says of lengths that do not fit."""
    ends, key_ends = _ends(name, "cu_seqlens_q", cu_seqlens_q, q), _ends(name, "cu_seqlens_k", cu_seqlens_k, k)
    if len(ends) != len(key_ends):
        raise ValueError(f"{name}: cu_seqlens_q has {len(ends)} sequences, cu_seqlens_k has {len(key_ends)}")
    return SequenceEnds(ends, key_ends)


def _refuse_weights(name: str, return_attn_probs: bool) -> None:
    if return_attn_probs:
        raise ValueError(f"{name}: return_attn_probs must be False, the weights are never in memory")


def _attention_spec(
    name: str,
    q: Tensor,
    dropout: float,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    sink: Tensor | None,
) -> AttentionSpec:
    """Collect the arguments of the function ``name``, and raise what it says of those that do not fit."""
    if not 0 <= dropout < 1:
        raise ValueError(f"{name}: dropout_p must be in [0, 1), got {dropout}")
    if softcap < 0:
        raise ValueError(f"{name}: softcap must not be negative, and 0 for none, got {softcap}")
    heads = q.shape[-2]
    if sink is not None and sink.shape != (heads,):
        raise ValueError(f"{name}: s_aux must be [{heads}], a value for each head of q, got {list(sink.shape)}")
    if alibi_slopes is not None and (alibi_slopes.dim() not in (1, 2) or alibi_slopes.shape[-1] != heads):
        raise ValueError(f"{name}: alibi_slopes must be [{heads}] or [batch, {heads}], got {list(alibi_slopes.shape)}")
    for what, tensor in (("s_aux", sink), ("alibi_slopes", alibi_slopes)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{name}: {what} must be floating point, got {tensor.dtype}")
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: {what} must be on {q.device} as q is, got {tensor.device}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return AttentionSpec(scale, dropout, sink, softcap, alibi_slopes, deterministic=deterministic)


def to_band(causal: bool, window_size: tuple[int, int]) -> Band:
    """Return flash-attn's ``window_size`` as a band; -1 is no limit."""
    left, right = window_size
    return Band(None if left < 0 else left, 0 if causal else None if right < 0 else right)


def _ends(name: str, what: str, cu_seqlens: Tensor | Sequence[int], tensor: Tensor) -> tuple[int, ...]:
    """Return where each sequence ends, and raise what the function ``name`` says of lengths that do not fit."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in INTEGERS:
            found = f"{list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
            raise ValueError(f"{name}: {what} must be [1 + sequences] integers, got {found}")
        ends = sequence_ends(cu_seqlens)
    else:
        ends = ends_from_list(cu_seqlens)
    require_ends_within(name, what, ends, tensor.shape[0])
    return ends


def check_inputs(name: str, q: Tensor, k: Tensor, v: Tensor, dimensions: int) -> None:
    """Raise what the function ``name`` says of tensors that do not fit."""
    if not q.is_floating_point():
        raise TypeError(f"{name}: q must be floating point, got {q.dtype}")
    shape = "[B, S, N, D]" if dimensions == 4 else "[T, N, D]"
    for what, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != dimensions:
            raise ValueError(f"{name}: {what} must be {shape}, got {list(tensor.shape)}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{name}: k and v must differ in head size only, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[-1] != k.shape[-1] or not q.shape[-1]:
        raise ValueError(f"{name}: q and k must have one head size above 0, got {q.shape[-1]} and {k.shape[-1]}")
    if 0 in (q.shape[-2], k.shape[-2]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{name}: the {q.shape[-2]} heads of q must be a multiple of the {k.shape[-2]} heads of k")
    for what, found in (("dtype", {t.dtype for t in (q, k, v)}), ("device", {t.device for t in (q, k, v)})):
        if len(found) > 1:
            raise ValueError(f"{name}: q, k and v must have one {what}, got {', '.join(sorted(map(str, found)))}")
