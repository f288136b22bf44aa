"""Launch ``npu_fusion_attention``, in the newest version that a release has."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from .._common.captures import capturing
from .._common.checkpoints import unseen_by_checkpoints
from ..attention_spec import CAUSAL, FULL, AttentionSpec, Band

_UNBOUNDED = 2147483647
_CAUSAL_MASK_SIZE = 2048  # of the mask that modes 2 to 4 take for any lengths
_NO_MASK, _WHOLE_MASK, _UPPER_LEFT, _LOWER_RIGHT, _SLIDING_BAND = 0, 1, 2, 3, 4  # values of sparse_mode
_QUERIES_WITHOUT_KEYS = 2  # value of inner_precise: a query without any key gives zero

_causal_masks: dict[torch.device, Tensor] = {}
_fake_causal_masks: WeakKeyDictionary[FakeTensorMode, dict[torch.device, Tensor]] = WeakKeyDictionary()
_refused: list[str] = []


class OperatorMask(NamedTuple):
    """Holds the arguments by which an operator is told which keys a query sees.

    Attributes:
        atten_mask: True where a key is masked out; for a band the upper triangle of 2048 x 2048; None without a mask.
        sparse_mode: how the operator reads ``atten_mask``.
        pre_tokens: how many keys before its own a query sees.
        next_tokens: how many keys behind its own a query sees.
        inner_precise: 2 where some queries may see no key, otherwise 0.
    """

    atten_mask: Tensor | None = None
    sparse_mode: int = _NO_MASK
    pre_tokens: int = _UNBOUNDED
    next_tokens: int = _UNBOUNDED
    inner_precise: int = 0


def to_operator_mask(masking: Band | Tensor, queries: int, keys: int, query: Tensor) -> OperatorMask:
    """Return the arguments by which an operator is told of a band, or of a mask.

    Args:
        masking: a band, causal or full if it is ``upper_left``; or a mask, True where a key is masked out.
        queries: the number of queries, for packed sequences that of the longest one.
        keys: the number of keys, likewise.
        query: a tensor on the device where the mask has to be.
    """
    if isinstance(masking, Tensor):
        return OperatorMask(masking, _WHOLE_MASK, inner_precise=_QUERIES_WITHOUT_KEYS)
    inner_precise = _QUERIES_WITHOUT_KEYS if masking.leaves_queries_without_keys(queries, keys) else 0
    band = masking.within(queries, keys)
    if band == FULL:
        return OperatorMask()
    if band[:2] == CAUSAL[:2]:
        sparse_mode = _UPPER_LEFT if band.upper_left else _LOWER_RIGHT
        return OperatorMask(_causal_mask(query), sparse_mode, inner_precise=inner_precise)
    pre_tokens, next_tokens = (_UNBOUNDED if limit is None else limit for limit in band[:2])
    return OperatorMask(_causal_mask(query), _SLIDING_BAND, pre_tokens, next_tokens, inner_precise)


def masking_from_arguments(
    atten_mask: Tensor | None,
    *,
    sparse_mode: int = _NO_MASK,
    pre_tockens: int = _UNBOUNDED,
    next_tockens: int = _UNBOUNDED,
    **_: object,
) -> Band | Tensor | None:
    """Return what :func:`to_operator_mask` made arguments of; None for arguments that it never returns."""
    if sparse_mode == _NO_MASK and atten_mask is None:
        return FULL
    if sparse_mode == _WHOLE_MASK and atten_mask is not None:
        return atten_mask.bool()
    if sparse_mode == _SLIDING_BAND:
        return Band(*(None if limit == _UNBOUNDED else limit for limit in (pre_tockens, next_tockens)))
    return {_UPPER_LEFT: CAUSAL._replace(upper_left=True), _LOWER_RIGHT: CAUSAL}.get(sparse_mode)


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    operator_mask: OperatorMask,
    spec: AttentionSpec,
    ends: tuple[int, ...] | Tensor | None = None,
    key_ends: tuple[int, ...] | Tensor | None = None,
    softmax_layout: str = "",
) -> tuple[Any, ...]:
    """Launch the newest version of the operator that the release has; torch_npu differentiates it.

    Args:
        query: in the layout ``BNSD``, ``BSND`` or ``TND``.
        key: likewise, with heads that divide those of the query.
        value: likewise, with a head size that is not larger.
        layout: which of them.
        operator_mask: which keys a query sees.
        spec: scale, dropout and sink.
        ends: where each sequence of the queries ends, for ``TND`` only; an int64 tensor on the CPU where
            :func:`takes_tensor_lengths` is true.
        key_ends: where each sequence of the keys ends, likewise.
        softmax_layout: ``TND`` with a sink; otherwise maxima and sums of packed sequences are ordered by head.

    Returns:
        The result in the layout of the query, with the head size of the value; and the maxima and sums of the softmax
        and the seed and offset of the dropout, which a gradient needs.
    """
    heads = query.shape[2 if layout == "BSND" else 1]
    sink = None if spec.sink is None else spec.sink.float()
    mask, mode, before, behind, inner_precise = operator_mask
    scale, keep_prob = spec.scale, 1.0 - spec.dropout
    # fmt: off
    if takes_tensor_lengths():
        return torch.ops.npu.npu_fusion_attention_v3(
            query, key, value, heads, layout, None, None, mask, scale, keep_prob, before, behind, inner_precise, None,
            as_host_tensor(ends), as_host_tensor(key_ends), mode, softmax_layout=softmax_layout, sink=sink,
        )
    if sink is None:
        return torch.ops.npu.npu_fusion_attention(
            query, key, value, heads, layout, None, None, mask, scale, keep_prob, before, behind, inner_precise, None,
            ends, key_ends, mode,
        )
    return torch.ops.npu.npu_fusion_attention(
        query, key, value, heads, layout, None, None, mask, scale, keep_prob, before, behind, inner_precise, None, ends,
        key_ends, mode, softmax_layout=softmax_layout, sink=sink,
    )
    # fmt: on


def as_host_tensor(ends: tuple[int, ...] | Tensor | None) -> Tensor | None:
    """Return the ends of sequences as an int64 tensor on the CPU, whatever torch's default device is."""
    return torch.tensor(ends, dtype=torch.int64, device="cpu") if isinstance(ends, tuple) else ends


def takes_tensor_lengths() -> bool:
    """Tell whether the release has the version of the operator, and of its gradient, that takes lengths as tensors."""
    return hasattr(torch.ops.npu, "npu_fusion_attention_v3") and hasattr(torch.ops.npu, "npu_fusion_attention_grad_v3")


def takes_sinks() -> bool:
    """Tell whether the operator and its gradient have a parameter for sinks, and CANN has not refused it."""
    return (
        not _refused
        and has_parameter("npu_fusion_attention", "sink")
        and has_parameter("npu_fusion_attention_grad", "sink")
        and has_parameter("npu_fusion_attention", "softmax_layout")
        and has_parameter("npu_fusion_attention_grad", "softmax_layout")
    )


@torch.compiler.assume_constant_result
def has_parameter(operator: str, name: str) -> bool:
    """Tell whether an operator of torch_npu has a parameter in this release."""
    return name in _operator_parameters(operator)


@functools.cache
def _operator_parameters(operator: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in getattr(torch.ops.npu, operator).default._schema.arguments)


def refuses_sinks(error: RuntimeError) -> bool:
    """Tell whether an error says that CANN has no sinks, which op-plugin had sooner; if so, warn and remember it."""
    if "sink is not supported" not in str(error):
        return False
    _refused.append(str(error))
    warnings.warn(
        f"flash_attention: attention with sinks is computed in torch from now on, with all scores in memory: {error}",
        stacklevel=2,
    )
    return True


def _causal_mask(query: Tensor) -> Tensor:
    """Return the mask that causal and band modes take, made once for each device.

    Fake tensors get one for each fake mode: they cannot be combined with real tensors.
    """
    device = query.device
    if torch.compiler.is_compiling():
        return _make_causal_mask(device)
    known = _causal_masks
    if isinstance(query, FakeTensor):
        known = _fake_causal_masks.setdefault(query.fake_mode, {})
    found = known.get(device)
    if found is None:
        # a tensor that is made in inference mode cannot be saved for a gradient
        with unseen_by_checkpoints(), torch.inference_mode(False):
            found = _make_causal_mask(device)
        if not capturing():
            known[device] = found
    return found


def _make_causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_CAUSAL_MASK_SIZE, _CAUSAL_MASK_SIZE, dtype=torch.bool, device=device).triu(1)
