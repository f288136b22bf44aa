"""Computes torch's own ``varlen_attn``, attention of packed sequences, on the NPU, while kernels are registered.

Its operators call CUDA's flash attention: torch, nn/attention/varlen.py. Ours are kernels of the same operators for the
NPU, so that autograd, graphs, and checkpoints that keep what ``torch_attn::_varlen_attn`` returns see what they know.
Between forward and gradient lies the logarithm of each query's sum, as flash attention has it, which the operator for
the gradient takes as the maximum of a softmax whose sum is one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.patches import Patches

_REPOSITORY = "FlashAttention"
_NAME = "_varlen_attn"  # of the operator; those of its gradient and of its form with ``out`` begin so
_STATISTICS = 8  # how often operators write the maximum and the sum of a query


def install(patches: Patches) -> None:
    """Register the operators until `patches` are undone; they are defined where somebody imports the function.

    Do nothing where the kernel was left out, or torch_npu has no operator that a gradient needs.
    """
    if not (registration.uses(_REPOSITORY) and hasattr(torch.ops.npu, "npu_fusion_attention_grad_v3")):
        return
    library = torch.library.Library("torch_attn", "IMPL")
    patches.at_the_end(library._destroy)
    library.impl(_NAME, _attend, "PrivateUse1")
    library.impl(f"{_NAME}_out", _attend_out, "PrivateUse1")
    library.impl(f"{_NAME}_backward", _gradients, "PrivateUse1")


def is_replaced() -> bool:
    """Tell whether the function is computed here."""
    is_defined = hasattr(torch.ops.torch_attn, _NAME)
    return (
        is_defined
        and torch._C._dispatch_has_kernel_for_dispatch_key(f"torch_attn::{_NAME}", "PrivateUse1")
        and _is_known()
    )


@functools.cache
def _is_known() -> bool:
    """Tell whether torch's operators take the arguments of the functions here, but for some at the end."""
    for name, ours in (_NAME, _attend), (f"{_NAME}_backward", _gradients):
        taken = [argument.name for argument in getattr(torch.ops.torch_attn, name).default._schema.arguments]
        if taken != [*inspect.signature(ours).parameters][: len(taken)]:
            return False
    return True


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, ``[T, N, D]``; the logarithm of each query's sum, ``[N, T]``; and two numbers nobody reads.

    The latter are on the host, since autograd makes zeros where they are.
    """
    if cu_seq_k is None or seqused_k is not None or block_table is not None:
        raise NotImplementedError(
            "varlen_attn: on an NPU keys lie one sequence behind the other, and queries see all of their sequence: "
            "gather those of pages or of a cache, and give their cu_seq_k in place of block_table and seqused_k"
        )
    kernel, sequences, band, spec = _describe(query, key, value, cu_seq_q, cu_seq_k, is_causal, scale, window_size)
    lse, results = query.new_empty(query.shape[1::-1], dtype=torch.float32), []
    for queries, keys, ends in sequences.split(kernel.ops.limits.MOST_SEQUENCES):
        mask = kernel.ops.fusion_attention.to_operator_mask(band, *ends.longest(), query)
        tensors = query[queries], key[keys], value[keys]
        result, maxima, sums, *_ = kernel.ops.fusion_attention.launch(*tensors, "TND", mask, spec, *ends, "TND")
        torch.add(maxima[..., 0].t(), sums[..., 0].log().t(), out=lse[:, queries])
        results.append(result)
    if sequences.ends[-1] < len(query):
        lse[:, sequences.ends[-1] :] = 0
    return _joined(results, query), lse, torch.empty(2, dtype=torch.uint64, device="cpu")


def _attend_out(out: Tensor, *inputs: Any) -> Tensor:
    result, lse, _ = _attend(*inputs)
    out.copy_(result)
    return lse


def _gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    with torch.enable_grad():  # where the limits of gradients hold
        wanted = query.detach().requires_grad_()
        kernel, sequences, band, spec = _describe(wanted, key, value, cu_seq_q, cu_seq_k, is_causal, scale, window_size)
    nothing_dropped = torch.zeros(1, dtype=torch.int64, device="cpu")
    gradients = []
    for queries, keys, part in sequences.split(kernel.ops.limits.MOST_SEQUENCES):
        mask = kernel.ops.fusion_attention.to_operator_mask(band, *part.longest(), query)
        ends, key_ends = (kernel.ops.fusion_attention.as_host_tensor(each) for each in part)
        maxima = lse[:, queries].t().unsqueeze(-1).expand(-1, -1, _STATISTICS).contiguous()
        found = torch.ops.npu.npu_fusion_attention_grad_v3(
            query[queries], key[keys], value[keys], grad_out[queries].contiguous(), query.shape[1], "TND",
            atten_mask=mask.atten_mask, softmax_max=maxima, softmax_sum=torch.ones_like(maxima),
            softmax_in=query.new_empty(0), attention_in=out[queries], scale_value=spec.scale,
            pre_tockens=mask.pre_tokens, next_tockens=mask.next_tokens, inner_precise=mask.inner_precise,
            seed=nothing_dropped, offset=nothing_dropped, actual_seq_qlen=ends, actual_seq_kvlen=key_ends,
            sparse_mode=mask.sparse_mode, softmax_layout="TND",
        )  # fmt: skip
        gradients.append(found[:3])
    return tuple(_joined(parts, whole) for parts, whole in zip(zip(*gradients), (query, key, value)))


def _describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    is_causal: bool,
    scale: float | None,
    window_size: Sequence[int] | None,
) -> tuple[ModuleType, Any, Any, Any]:
    """Return the kernel, its sequences and band, and how scores become weights; raise for what it does not compute.

    The host reads lengths once for all calls with the same tensors.
    """
    if not _is_known():
        raise NotImplementedError(
            f"varlen_attn: kernels-ext-npu does not know the arguments of torch {torch.__version__}"
        )
    kernel = registration.package(_REPOSITORY)
    limits, functions = kernel.ops.limits, kernel.functional
    functions.check_inputs("varlen_attn", query, key, value, 3)
    kernel.read_together(*{id(each): each for each in (cu_seq_q, cu_seq_k)}.values())
    sequences = functions.read_sequences("varlen_attn", query, key, cu_seq_q, cu_seq_k)
    band = functions.to_band(is_causal, window_size or (-1, -1))
    spec = kernel.attention_spec.AttentionSpec(query.shape[2] ** -0.5 if scale is None else scale)
    used, used_keys = (ends[-1] if ends else 0 for ends in sequences)
    tensors = query[:used], key[:used_keys], value[:used_keys]
    aligned = 4 if query.dtype == torch.float32 else 1
    if not (
        limits.is_fused(*tensors, spec)
        and limits.is_fused_varlen(sequences, band)
        and limits.fits_varlen_gradient(*tensors, band)
        and not query.shape[2] % aligned
        and query.shape[2] == value.shape[2]
    ):
        raise NotImplementedError(
            f"varlen_attn: the NPU's operators take no {query.dtype} {list(query.shape)} and {list(key.shape)} with "
            f"window_size {window_size} and these lengths, as where a query sees no key: flash_attn_varlen_func of "
            "kernels_ext_npu.load('FlashAttention') computes it in torch"
        )
    return kernel, sequences.without_empty(), band, spec


def _joined(parts: tuple[Tensor, ...] | list[Tensor], whole: Tensor) -> Tensor:
    """Put parts behind each other, and zeros behind them, as many tokens as `whole` has."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    missing = len(whole) - len(joined)
    return F.pad(joined, (0, 0, 0, 0, 0, missing)) if missing else joined
