"""Derivatives of ``npu_fusion_attention``: deterministic gradients, those of sinks, and second derivatives in torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._common.derivatives import gradients
from .._common.second_order import let_differentiate
from ..attention_spec import AttentionSpec, SequenceEnds
from .fusion_attention import (
    OperatorMask,
    as_host_tensor,
    launch,
    masking_from_arguments,
    takes_tensor_lengths,
)
from .limits import needs_gradient
from .reference import reference_attention, reference_varlen_attention


def launch_differentiable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    operator_mask: OperatorMask,
    spec: AttentionSpec,
    ends: tuple[int, ...] | Tensor | None = None,
    key_ends: tuple[int, ...] | Tensor | None = None,
) -> Tensor:
    """Compute the result of ``launch``, with deterministic gradients and those of sinks where they are needed."""
    sink = spec.sink
    wants_determinism = spec.deterministic and not torch.are_deterministic_algorithms_enabled()
    trains_sink = sink is not None and torch.is_grad_enabled() and sink.requires_grad
    if not (wants_determinism or sink is not None) or not (needs_gradient(query, key, value) or trains_sink):
        return launch(query, key, value, layout, operator_mask, spec, ends, key_ends)[0]
    key_ends = None if key_ends is ends else key_ends  # torch.compile takes no tensor twice
    if takes_tensor_lengths():
        ends, key_ends = as_host_tensor(ends), as_host_tensor(key_ends)
    sink, spec = None if sink is None else sink.float(), replace(spec, sink=None)
    return FusionAttention.apply(query, key, value, sink, layout, operator_mask, spec, ends, key_ends)


class FusionAttention(torch.autograd.Function):
    """Launches ``npu_fusion_attention`` and its gradient, and computes the gradient of a sink.

    The operator is not asked for the gradient of a sink. CANN's ops-transformer, attention/flash_attention_score_grad:
    in deterministic mode a template that has none is taken for heads of up to 128 (op_host,
    …_tiling_s1s2_bn2gs1s2_basic_det.cpp, ``IsCapable`` of 8.5.0, 9.0.0 and 9.1.0); the other one leaves a piece out for
    some sizes before 9.1 (op_kernel, flash_attention_score_grad_post.h, ``tailDsinkSumSize``) and takes no float32. It
    also sums over all scores, ``S_q · S_k`` a head, where the result and the statistics of the softmax, ``S_q · D``,
    are enough. These include the sink, so that the other gradients are right without it.

    ``apply(query, key, value, sink, layout, operator_mask, spec, ends, key_ends)`` takes what
    ``fusion_attention.launch`` takes, except that the sink, in float32 or None, is an argument of its own and none of
    ``spec``, lengths are tensors where ``takes_tensor_lengths`` says so, and ``key_ends`` is None where it is ``ends``.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
        layout, operator_mask, spec, ends, key_ends = rest
        softmax_layout = "TND" if layout == "TND" and sink is not None else ""
        with_sink = replace(spec, sink=sink)
        lengths = ends, ends if key_ends is None else key_ends
        out, softmax_max, softmax_sum, softmax_out, *random = launch(
            query, key, value, layout, operator_mask, with_sink, *lengths, softmax_layout
        )
        lengths_and_random = ends, key_ends, *random
        tensors = lengths_and_random if takes_tensor_lengths() else ()
        mask = operator_mask.atten_mask
        ctx.save_for_backward(query, key, value, sink, mask, out, softmax_max, softmax_sum, softmax_out, *tensors)
        ctx.numbers = () if takes_tensor_lengths() else lengths_and_random
        ctx.rest = layout, operator_mask._replace(atten_mask=None), spec, softmax_layout
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, mask, out, softmax_max, softmax_sum, softmax_out, *tensors = ctx.saved_tensors
        layout, operator_mask, spec, softmax_layout = ctx.rest
        ends, key_ends, *random = tensors or ctx.numbers
        key_ends = ends if key_ends is None else key_ends
        heads = query.shape[2 if layout == "BSND" else 1]
        _, sparse_mode, pre_tokens, next_tokens, inner_precise = operator_mask
        scale, keep_prob, grad = spec.scale, 1.0 - spec.dropout, grad.contiguous()
        # for a second derivative all gradients are computed together in torch, by _gradients_in_torch
        sink_argument = sink if torch.is_grad_enabled() else None
        # fmt: off
        with _deterministic() if spec.deterministic else nullcontext():
            if takes_tensor_lengths():
                seed, offset = random
                gradients = torch.ops.npu.npu_fusion_attention_grad_v3(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=softmax_max,
                    softmax_sum=softmax_sum, softmax_in=softmax_out, attention_in=out, scale_value=scale,
                    keep_prob=keep_prob, pre_tockens=pre_tokens, next_tockens=next_tokens, inner_precise=inner_precise,
                    seed=seed, offset=offset, actual_seq_qlen=ends, actual_seq_kvlen=key_ends, sparse_mode=sparse_mode,
                    softmax_layout=softmax_layout, sink=sink_argument,
                )
            elif sink is None:
                seed, offset, numels = random
                gradients = torch.ops.npu.npu_fusion_attention_grad(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=softmax_max,
                    softmax_sum=softmax_sum, softmax_in=softmax_out, attention_in=out, scale_value=scale,
                    keep_prob=keep_prob, pre_tockens=pre_tokens, next_tockens=next_tokens, inner_precise=inner_precise,
                    seed=seed, offset=offset, numels=numels, actual_seq_qlen=ends, actual_seq_kvlen=key_ends,
                    sparse_mode=sparse_mode,
                )
            else:
                seed, offset, numels = random
                gradients = torch.ops.npu.npu_fusion_attention_grad(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=softmax_max,
                    softmax_sum=softmax_sum, softmax_in=softmax_out, attention_in=out, scale_value=scale,
                    keep_prob=keep_prob, pre_tockens=pre_tokens, next_tockens=next_tokens, inner_precise=inner_precise,
                    seed=seed, offset=offset, numels=numels, actual_seq_qlen=ends, actual_seq_kvlen=key_ends,
                    sparse_mode=sparse_mode, softmax_layout=softmax_layout, sink=sink_argument,
                )
        # fmt: on
        d_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            if sink_argument is None:
                d_sink = _sink_gradient(sink, grad, out, softmax_max, softmax_sum, layout)
            else:
                d_sink = gradients[4]
        return *gradients[:3], d_sink, None, None, None, None, None


def _sink_gradient(
    sink: Tensor, grad: Tensor, out: Tensor, softmax_max: Tensor, softmax_sum: Tensor, layout: str
) -> Tensor:
    """Sum ``-weight · (grad · out)`` over the queries of each head, where ``weight`` is the softmax of the sink.

    Args:
        sink: ``[N]``, float32.
        grad: the gradient of the result, in the layout.
        out: the result, in the layout.
        softmax_max: the largest score of each query, eight times: ``[B, N, S, 8]``, or ``[T, N, 8]`` in ``TND``.
        softmax_sum: the sum of exponentials of each query, likewise.
        layout: ``BNSD``, ``BSND`` or ``TND``.
    """
    products = (grad.float() * out).sum(-1)
    if layout == "BSND":
        products = products.transpose(1, 2)
    head_sink, query_dims = (sink, 0) if layout == "TND" else (sink.unsqueeze(-1), (0, 2))
    weights = torch.exp(head_sink - softmax_max[..., 0]) / softmax_sum[..., 0]
    # a query that sees no key contributes nothing, whatever its statistics are
    return -torch.where(products == 0, products, weights * products).sum(query_dims)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Turn on torch's deterministic algorithms, with an error where there is none only if they were on before.

    torch_npu passes this switch to each operator that it launches: op-plugin, op_plugin/utils/op_api_common_base.h.
    """
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=not before or warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


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
