"""Attention whose gradients are the same, bit for bit, in every run: what ``deterministic`` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .operators import Sparsity
from .options import Options


class DeterministicAttention(torch.autograd.Function):
    """Launches ``npu_fusion_attention``, and its gradient while torch asks for deterministic algorithms.

    torch_npu hands that switch to each operator when it launches: op-plugin, op_plugin/utils/op_api_common_base.h.
    ``apply(query, key, value, sink, layout, sparsity, options, ends, key_ends)`` takes what ``operators.launch`` takes,
    with the sink in float32 or None.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
        layout, sparsity, options, ends, key_ends = rest
        heads = query.shape[2 if layout == "BSND" else 1]
        scale, keep = options.scale, 1.0 - options.dropout
        mask, mode, before, behind, inner = sparsity
        # fmt: off
        if sink is None:
            out, maximum, total, reserved, *random = torch.ops.npu.npu_fusion_attention(
                query, key, value, heads, layout, None, None, mask, scale, keep, before, behind, inner, None, ends,
                key_ends, mode,
            )
        else:
            out, maximum, total, reserved, *random = torch.ops.npu.npu_fusion_attention(
                query, key, value, heads, layout, None, None, mask, scale, keep, before, behind, inner, None, ends,
                key_ends, mode, sink=sink,
            )
        # fmt: on
        ctx.save_for_backward(query, key, value, sink, mask, out, maximum, total, reserved)
        ctx.rest, ctx.random = (heads, *rest), random
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, mask, out, maximum, total, reserved = ctx.saved_tensors
        heads, layout, sparsity, options, ends, key_ends = ctx.rest
        seed, offset, numels = ctx.random
        mode, before, behind, inner = sparsity[1:]
        scale, keep, grad = options.scale, 1.0 - options.dropout, grad.contiguous()
        # fmt: off
        with _deterministic():
            if sink is None:
                gradients = torch.ops.npu.npu_fusion_attention_grad(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=maximum, softmax_sum=total,
                    softmax_in=reserved, attention_in=out, scale_value=scale, keep_prob=keep, pre_tockens=before,
                    next_tockens=behind, inner_precise=inner, seed=seed, offset=offset, numels=numels,
                    actual_seq_qlen=ends, actual_seq_kvlen=key_ends, sparse_mode=mode,
                )
            else:
                gradients = torch.ops.npu.npu_fusion_attention_grad(
                    query, key, value, grad, heads, layout, atten_mask=mask, softmax_max=maximum, softmax_sum=total,
                    softmax_in=reserved, attention_in=out, scale_value=scale, keep_prob=keep, pre_tockens=before,
                    next_tockens=behind, inner_precise=inner, seed=seed, offset=offset, numels=numels,
                    actual_seq_qlen=ends, actual_seq_kvlen=key_ends, sparse_mode=mode, sink=sink,
                )
        # fmt: on
        return *gradients[:3], None if sink is None else gradients[4], None, None, None, None, None


def launch_deterministic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    sparsity: Sparsity,
    options: Options,
    ends: tuple[int, ...] | None = None,
    key_ends: tuple[int, ...] | None = None,
) -> Tensor:
    """Compute what ``operators.launch`` computes, with gradients that are the same in every run."""
    sink = None if options.sink is None else options.sink.float()
    return DeterministicAttention.apply(query, key, value, sink, layout, sparsity, options, ends, key_ends)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch ask for deterministic algorithms, and raise where there are none only if it did so before."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=not before or warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
