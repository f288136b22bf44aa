"""Attention as a node of autograd of its own: for gradients that are the same in every run, and for sinks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention_spec import Options
from .fusion_attention import Sparsity, launch, on_host, run, takes_tensors
from .limits import needs_gradient


def launch_differentiable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    sparsity: Sparsity,
    options: Options,
    ends: tuple[int, ...] | Tensor | None = None,
    key_ends: tuple[int, ...] | Tensor | None = None,
) -> Tensor:
    """Compute what ``operators.launch`` computes, with the gradients that the options ask for."""
    sink = options.sink
    alone = options.deterministic and not torch.are_deterministic_algorithms_enabled()
    trains_sink = sink is not None and torch.is_grad_enabled() and sink.requires_grad
    if not (alone or sink is not None) or not (needs_gradient(query, key, value) or trains_sink):
        return launch(query, key, value, layout, sparsity, options, ends, key_ends)
    key_ends = None if key_ends is ends else key_ends  # torch.compile takes no tensor twice
    if takes_tensors():
        ends, key_ends = on_host(ends), on_host(key_ends)
    sink, options = None if sink is None else sink.float(), replace(options, sink=None)
    return AttentionNode.apply(query, key, value, sink, layout, sparsity, options, ends, key_ends)


class AttentionNode(torch.autograd.Function):
    """Launches ``npu_fusion_attention`` and its gradient, and computes the gradient of a sink.

    The operator is not asked for that of a sink. CANN's ops-transformer, attention/flash_attention_score_grad: in
    deterministic mode a template that has none is taken for heads of up to 128 (op_host,
    …_tiling_s1s2_bn2gs1s2_basic_det.cpp, ``IsCapable`` of 8.5.0, 9.0.0 and 9.1.0); the other one leaves a piece out for
    some sizes before 9.1 (op_kernel, flash_attention_score_grad_post.h, ``tailDsinkSumSize``) and takes no float32. It
    also sums over all scores, ``S_q · S_k`` a head, where the result and the statistics of the rows, ``S_q · D``, do.
    They hold the sink already, so that the other gradients are the same.

    ``apply(query, key, value, sink, layout, sparsity, options, ends, key_ends)`` takes what ``operators.launch`` takes,
    with the sink in float32 or None, apart from the options, lengths as tensors where ``takes_tensors`` says so, and
    None for ``key_ends`` that are ``ends``.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
        layout, sparsity, options, ends, key_ends = rest
        by_token = "TND" if layout == "TND" and sink is not None else ""
        with_sink = replace(options, sink=sink)
        lengths = ends, ends if key_ends is None else key_ends
        out, maximum, total, reserved, *random = run(query, key, value, layout, sparsity, with_sink, *lengths, by_token)
        lengths_and_random = ends, key_ends, *random
        tensors = lengths_and_random if takes_tensors() else ()
        ctx.save_for_backward(query, key, value, sink, sparsity.mask, out, maximum, total, reserved, *tensors)
        ctx.numbers = () if takes_tensors() else lengths_and_random
        ctx.rest = layout, sparsity._replace(mask=None), options, by_token
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, mask, out, maximum, total, reserved, *tensors = ctx.saved_tensors
        layout, sparsity, options, by_token = ctx.rest
        ends, key_ends, *random = tensors or ctx.numbers
        key_ends = ends if key_ends is None else key_ends
        heads = query.shape[2 if layout == "BSND" else 1]
        _, mode, before, behind, inner = sparsity
        scale, keep, grad = options.scale, 1.0 - options.dropout, grad.contiguous()
        # to be differentiated again, all of them are computed together in torch: second_derivatives.py
        asked = sink if torch.is_grad_enabled() else None
        # fmt: off
        with _deterministic() if options.deterministic else nullcontext():
            if takes_tensors():
                seed, offset = random
                gradients = torch.ops.npu.npu_fusion_attention_grad_v3(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=maximum, softmax_sum=total,
                    softmax_in=reserved, attention_in=out, scale_value=scale, keep_prob=keep, pre_tockens=before,
                    next_tockens=behind, inner_precise=inner, seed=seed, offset=offset, actual_seq_qlen=ends,
                    actual_seq_kvlen=key_ends, sparse_mode=mode, softmax_layout=by_token, sink=asked,
                )
            elif sink is None:
                seed, offset, numels = random
                gradients = torch.ops.npu.npu_fusion_attention_grad(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=maximum, softmax_sum=total,
                    softmax_in=reserved, attention_in=out, scale_value=scale, keep_prob=keep, pre_tockens=before,
                    next_tockens=behind, inner_precise=inner, seed=seed, offset=offset, numels=numels,
                    actual_seq_qlen=ends, actual_seq_kvlen=key_ends, sparse_mode=mode,
                )
            else:
                seed, offset, numels = random
                gradients = torch.ops.npu.npu_fusion_attention_grad(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=maximum, softmax_sum=total,
                    softmax_in=reserved, attention_in=out, scale_value=scale, keep_prob=keep, pre_tockens=before,
                    next_tockens=behind, inner_precise=inner, seed=seed, offset=offset, numels=numels,
                    actual_seq_qlen=ends, actual_seq_kvlen=key_ends, sparse_mode=mode, softmax_layout=by_token,
                    sink=asked,
                )
        # fmt: on
        of_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            of_sink = gradients[4] if asked is not None else _gradient_of_sink(sink, grad, out, maximum, total, layout)
        return *gradients[:3], of_sink, None, None, None, None, None


def _gradient_of_sink(sink: Tensor, grad: Tensor, out: Tensor, maximum: Tensor, total: Tensor, layout: str) -> Tensor:
    """Sum ``-weight · (grad · out)`` over the rows of each head, where a row's weight is that of the sink in it.

    Args:
        sink: ``[N]``, float32.
        grad: the gradient of the result, in the layout.
        out: the result, in the layout.
        maximum: of each row, eight times: ``[B, N, S, 8]``, or ``[T, N, 8]`` in the layout ``TND``.
        total: the sum of exponents of each row, likewise.
        layout: ``BNSD``, ``BSND`` or ``TND``.
    """
    products = (grad.float() * out).sum(-1)
    if layout == "BSND":
        products = products.transpose(1, 2)
    of_head, rows = (sink, 0) if layout == "TND" else (sink.unsqueeze(-1), (0, 2))
    weights = torch.exp(of_head - maximum[..., 0]) / total[..., 0]
    # a row that sees no key has no part, whatever its statistics are
    return -torch.where(products == 0, products, weights * products).sum(rows)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch ask for deterministic algorithms, and raise where there are none only if it did so before.

    torch_npu hands that switch to each operator when it launches: op-plugin, op_plugin/utils/op_api_common_base.h.
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
