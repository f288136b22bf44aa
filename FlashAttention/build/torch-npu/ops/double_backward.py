"""Second derivatives of attention: the gradients of ``npu_fusion_attention`` again, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._common.derivatives import gradients
from .._common.second_order import let_differentiate
from ..attention_spec import AttentionSpec, SequenceEnds
from .fusion_attention import masking_from_arguments
from .reference import reference_attention, reference_varlen_attention


def register_double_backward() -> None:
    """Make the gradients of ``npu_fusion_attention`` differentiable, where torch_npu is installed."""
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
    """Compute what the gradient operators do, with all scores in memory; or return the reason why this cannot."""
    masking = masking_from_arguments(atten_mask, **rest)
    if keep_prob < 1:
        return "attention with dropout has no second derivative: only the operator knows which weights it left out"
    if masking is None or pse is not None or layout not in ("BNSD", "BSND", "TND"):
        return f"npu_fusion_attention has no second derivative in layout {layout} with this pse, prefix or sparse_mode"
    ends, key_ends = (tuple(map(int, e)) if e is not None else () for e in (actual_seq_qlen, actual_seq_kvlen))

    def attention(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        spec = AttentionSpec(scale_value, sink=sink)
        if layout == "TND":
            return reference_varlen_attention(query, key, value, SequenceEnds(ends, key_ends), masking, spec)
        if layout == "BNSD":
            return reference_attention(query, key, value, masking, spec).transpose(1, 2)
        return reference_attention(*(tensor.transpose(1, 2) for tensor in (query, key, value)), masking, spec)

    *found, d_sink = gradients(attention, (query, key, value, sink), (True, True, True, sink is not None), grad)
    nothing = query.new_empty(0)
    return *found, nothing, nothing if d_sink is None else d_sink
