"""What the gradients of ``npu_fusion_attention`` compute, in torch, for who differentiates them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._common.derivatives import gradients
from .._common.second_order import let_differentiate
from ..attention_spec import Options, Sequences
from .fusion_attention import band_or_mask
from .reference import attend_in_torch, attend_packed_in_torch


def register_derivative_of_attention() -> None:
    """Let the gradients of ``npu_fusion_attention`` be differentiated, where torch_npu is there."""
    for name in ("npu_fusion_attention_grad", "npu_fusion_attention_grad_v3"):
        if hasattr(torch.ops.npu, name):
            let_differentiate(getattr(torch.ops.npu, name).default, 3, _gradients_in_torch)


def _gradients_in_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    heads: int,
    layout: str,
    *,
    pse: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: Sequence[int] | Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sink: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor | None, ...] | str:
    """Compute what the operators do, with all scores in memory, or say why not."""
    seen = band_or_mask(atten_mask, **rest)
    if keep_prob < 1:
        return "attention with dropout has no second derivative: only the operator knows which weights it left out"
    if seen is None or pse is not None or layout not in ("BNSD", "BSND", "TND"):
        return f"npu_fusion_attention has no second derivative in layout {layout} with this pse, prefix or sparse_mode"
    ends, key_ends = (tuple(map(int, e)) if e is not None else () for e in (actual_seq_qlen, actual_seq_kvlen))

    def attention(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        options = Options(scale_value, sink=sink)
        if layout == "TND":
            return attend_packed_in_torch(query, key, value, Sequences(ends, key_ends), seen, options)
        if layout == "BNSD":
            return attend_in_torch(query, key, value, seen, options).transpose(1, 2)
        return attend_in_torch(*(tensor.transpose(1, 2) for tensor in (query, key, value)), seen, options)

    *found, of_sink = gradients(attention, (query, key, value, sink), (True, True, True, sink is not None), grad)
    nothing = query.new_empty(0)
    return *found, nothing, nothing if of_sink is None else of_sink
