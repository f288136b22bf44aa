"""Attention as one launch of ``npu_fusion_attention``, and which of its versions a release has."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from .._common.captures import capturing
from ..attention_spec import CAUSAL, FULL, Band, Options
from ..selective_checkpoints import unseen

_UNBOUNDED = 2147483647
_TRIANGLE = 2048  # the size of the mask that the modes below share, whatever the lengths are
_DEFAULT, _ALL, _UPPER_LEFT, _LOWER_RIGHT, _BAND = 0, 1, 2, 3, 4  # sparse_mode
_EXPECT_EMPTY_ROWS = 2  # inner_precise: a query without any key gives zero

_triangles: dict[torch.device, Tensor] = {}
_fake_triangles: WeakKeyDictionary[FakeTensorMode, dict[torch.device, Tensor]] = WeakKeyDictionary()
_refused: list[str] = []


class Sparsity(NamedTuple):
    """Holds how an operator is told which keys a query sees.

    Attributes:
        mask: True where a key is left out; for a band the upper triangle of 2048 x 2048; None where all are seen.
        mode: the ``sparse_mode``.
        before: how many keys before its own a query sees.
        behind: how many keys behind its own a query sees.
        inner_precise: whether queries are expected that see no key.
    """

    mask: Tensor | None = None
    mode: int = _DEFAULT
    before: int = _UNBOUNDED
    behind: int = _UNBOUNDED
    inner_precise: int = 0


def sparsity_of(seen: Band | Tensor, queries: int, keys: int, query: Tensor) -> Sparsity:
    """Return how an operator is told of a band among so many queries and keys, or of a mask.

    Args:
        seen: a band, one from the start with no limit but that of causal attention; or what is left out.
        queries: how many queries there are, of a packed batch in its longest sequence.
        keys: how many keys there are, likewise.
        query: a tensor on the device where the mask has to be.
    """
    if isinstance(seen, Tensor):
        return Sparsity(seen, _ALL, inner_precise=_EXPECT_EMPTY_ROWS)
    inner_precise = _EXPECT_EMPTY_ROWS if seen.leaves_rows_empty(queries, keys) else 0
    band = seen.within(queries, keys)
    if band == FULL:
        return Sparsity()
    if band[:2] == CAUSAL[:2]:
        mode = _UPPER_LEFT if band.from_start else _LOWER_RIGHT
        return Sparsity(_triangle(query), mode, inner_precise=inner_precise)
    before, behind = (_UNBOUNDED if limit is None else limit for limit in band[:2])
    return Sparsity(_triangle(query), _BAND, before, behind, inner_precise)


def band_or_mask(
    atten_mask: Tensor | None,
    *,
    sparse_mode: int = _DEFAULT,
    pre_tockens: int = _UNBOUNDED,
    next_tockens: int = _UNBOUNDED,
    **_: object,
) -> Band | Tensor | None:
    """Return which keys a query sees, or a mask of what is left out, of an operator's arguments; None for others."""
    if sparse_mode == _DEFAULT and atten_mask is None:
        return FULL
    if sparse_mode == _ALL and atten_mask is not None:
        return atten_mask.bool()
    if sparse_mode == _BAND:
        return Band(*(None if limit == _UNBOUNDED else limit for limit in (pre_tockens, next_tockens)))
    return {_UPPER_LEFT: CAUSAL._replace(from_start=True), _LOWER_RIGHT: CAUSAL}.get(sparse_mode)


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    sparsity: Sparsity,
    options: Options,
    ends: tuple[int, ...] | Tensor | None = None,
    key_ends: tuple[int, ...] | Tensor | None = None,
) -> Tensor:
    """Launch the newest version that the release has, differentiated by torch_npu.

    Args:
        query: in the layout ``BNSD``, ``BSND`` or ``TND``.
        key: likewise, with heads that divide those of the query.
        value: likewise, with a head size that is not larger.
        layout: which of them.
        sparsity: which keys a query sees.
        options: scale, dropout and sink.
        ends: where each sequence of the queries ends; for ``TND`` only. A tensor, int64 on the CPU, where
            :func:`takes_tensors` says so.
        key_ends: where each sequence of the keys ends; for ``TND`` only.

    Returns:
        The result in the layout of the query, with the head size of the value.
    """
    return run(query, key, value, layout, sparsity, options, ends, key_ends)[0]


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    sparsity: Sparsity,
    options: Options,
    ends: tuple[int, ...] | Tensor | None = None,
    key_ends: tuple[int, ...] | Tensor | None = None,
    statistics: str = "",
) -> tuple[Any, ...]:
    """Return all that :func:`launch` computes: also the maximum and the sum of each row, and the seed of the dropout.

    With a sink these can be asked for in the order ``TND``; otherwise the rows of a packed sequence lie head by head.
    """
    heads = query.shape[2 if layout == "BSND" else 1]
    sink = None if options.sink is None else options.sink.float()
    mask, mode, before, behind, inner = sparsity
    scale, keep = options.scale, 1.0 - options.dropout
    # fmt: off
    if takes_tensors():
        return torch.ops.npu.npu_fusion_attention_v3(
            query, key, value, heads, layout, None, None, mask, scale, keep, before, behind, inner, None, on_host(ends),
            on_host(key_ends), mode, softmax_layout=statistics, sink=sink,
        )
    if sink is None:
        return torch.ops.npu.npu_fusion_attention(
            query, key, value, heads, layout, None, None, mask, scale, keep, before, behind, inner, None, ends,
            key_ends, mode,
        )
    return torch.ops.npu.npu_fusion_attention(
        query, key, value, heads, layout, None, None, mask, scale, keep, before, behind, inner, None, ends, key_ends,
        mode, softmax_layout=statistics, sink=sink,
    )
    # fmt: on


def on_host(ends: tuple[int, ...] | Tensor | None) -> Tensor | None:
    """Return lengths as the operators take them, wherever tensors are made by default."""
    return torch.tensor(ends, dtype=torch.int64, device="cpu") if isinstance(ends, tuple) else ends


def takes_tensors() -> bool:
    """Tell whether the release has a version that takes lengths as a tensor, with its gradient."""
    return hasattr(torch.ops.npu, "npu_fusion_attention_v3") and hasattr(torch.ops.npu, "npu_fusion_attention_grad_v3")


def takes_sinks() -> bool:
    """Tell whether the release has sinks, forward and backward, and this CANN has not refused them."""
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
    return name in _parameters_of(operator)


@functools.cache
def _parameters_of(operator: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in getattr(torch.ops.npu, operator).default._schema.arguments)


def refuses_sinks(error: RuntimeError) -> bool:
    """Tell whether an error says that this CANN has no sinks, and remember it: op-plugin has had them for longer."""
    if "sink is not supported" not in str(error):
        return False
    _refused.append(str(error))
    warnings.warn(
        f"flash_attention: attention with sinks is computed in torch from now on, with all scores in memory: {error}",
        stacklevel=2,
    )
    return True


def _triangle(query: Tensor) -> Tensor:
    """Return the mask that causal and band modes share: made once a device, and not once a call.

    Fake tensors have one of their own in each mode, since they do not go with real ones.
    """
    device = query.device
    if torch.compiler.is_compiling():
        return _new_triangle(device)
    known = _triangles
    if isinstance(query, FakeTensor):
        known = _fake_triangles.setdefault(query.fake_mode, {})
    found = known.get(device)
    if found is None:
        with unseen(), torch.inference_mode(False):  # what is made in inference mode cannot be saved for a gradient
            found = _new_triangle(device)
        if not capturing():
            known[device] = found
    return found


def _new_triangle(device: torch.device) -> Tensor:
    return torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device).triu(1)
