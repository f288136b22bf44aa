"""Define MoE token permutation: rows ordered by expert, and back.

Shapes, dtypes and limits: op-plugin, op_plugin/utils/KernelNpuOutputSize.cpp, and CANN's ops-transformer,
moe/moe_token_{permute,unpermute}{,_grad}, README and op_host. Sums and skipped rows: op_kernel there. T tokens of H
elements go to K experts each; ``sorted_indices [T·K]``, int32, names the permuted row of every token and slot. Sums
are taken in float32 in the order of the slots and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, float32, int8, int32, int64

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.cann import CANN, require_before
from softnpu.formulas import formula

MAX_TOP_K = 512
# the indices are sorted as float32: both their values and their number are below this
SORT_LIMIT = 16777215


@formula
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows of ``tokens [T, H]`` in the stable order of the experts in ``indices [T, K]`` or ``[T]``, and
    sorted_indices: where every row went, the inverse of that order.

    A positive num_out_tokens keeps that many rows, a negative one drops as many from the end, 0 and None keep all.
    sorted_indices always has T·K elements; those at or beyond the number of rows name dropped ones. The indices may
    be int32 or int64.
    """
    operator = "npu_moe_token_permute"
    _require_unpadded(operator, padded_mode)
    require_dtypes(
        operator, {(t, i) for t in (*FLOATING, int8) for i in (int32, int64)}, tokens=tokens, indices=indices
    )
    _require_dims(operator, (2,), tokens=tokens)
    _require_dims(operator, (1, 2), indices=indices)
    fits = tokens.shape[0] == indices.shape[0]
    require(fits, operator, f"tokens {describe(tokens)} and indices {describe(indices)} differ in the number of rows")
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    _require_top_k(operator, top_k, low=0)
    count = indices.numel()
    require(count < SORT_LIMIT, operator, f"{count} indices; the device sorts fewer than {SORT_LIMIT}")
    in_range = bool(((indices >= 0) & (indices < SORT_LIMIT)).all())
    require(in_range, operator, f"an index is negative or not below {SORT_LIMIT}: the device would sort it wrongly")
    wanted = num_out_tokens or 0
    rows = min(wanted, count) if wanted > 0 else wanted + count
    require(rows >= 0, operator, f"num_out_tokens is {num_out_tokens}; there are {count} rows to drop")

    order = torch.argsort(indices.flatten(), stable=True)
    sorted_indices = torch.empty(count, dtype=int32)
    sorted_indices[order] = torch.arange(count, dtype=int32)
    return tokens[order[:rows] // max(top_k, 1)], sorted_indices


@formula
def npu_moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """Compute npu_moe_token_permute_grad_v2 with what it needs of tokens and indices taken from them."""
    operator = "npu_moe_token_permute_grad"
    _require_dims(operator, (2,), tokens=tokens)
    _require_dims(operator, (1, 2), indices=indices)
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    return _permute_grad(
        operator, grad_permuted_tokens, sorted_indices, tokens.shape[0], tokens.dtype, top_k, padded_mode
    )


@formula
def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,  # noqa: N803  the schema's name
    padded_mode: bool = False,
) -> Tensor:
    """Compute ``grad_tokens[t] = Σ_j grad_permuted[sorted_indices[t·K + j]]``; dropped rows add nothing."""
    operator = "npu_moe_token_permute_grad_v2"
    return _permute_grad(
        operator, grad_permuted_tokens, sorted_indices, tokens_size_0, tokens_dtype, num_topK, padded_mode
    )


def _permute_grad(
    operator: str, grad: Tensor, sorted_indices: Tensor, tokens: int, dtype: torch.dtype, top_k: int, padded_mode: bool
) -> Tensor:
    _require_unpadded(operator, padded_mode)
    require_dtypes(operator, {(d, int32) for d in FLOATING}, grad_permuted_tokens=grad, sorted_indices=sorted_indices)
    require(grad.dtype == dtype, operator, f"the gradient is {describe(grad)} and the tokens are {dtype}")
    _require_dims(operator, (2,), grad_permuted_tokens=grad)
    _require_top_k(operator, top_k)
    _require_sorted_indices(operator, sorted_indices, tokens, top_k)
    return _sums(grad, sorted_indices.view(tokens, top_k), None).to(dtype)


@formula
def _npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``out[t] = Σ_j probs[t, j] · permuted[sorted_indices[t·K + j]]`` for ``permuted_tokens [R, H]`` and
    ``probs [T, K]``, which may have a floating dtype of its own; without probs a plain gather, K = 1.

    Rows are not read, so that a NaN in them does not count, where the index is at or beyond R or the probability is
    zero. npu_moe_token_unpermute of newer releases calls this operator. The second result is what its backward pass
    keeps: permuted_tokens, and nothing without probs. restore_shape is for padded mode only, which the device has not.
    """
    operator = "npu_moe_token_unpermute"
    _require_unpadded(operator, padded_mode)
    _require_dims(operator, (2,), permuted_tokens=permuted_tokens)
    tokens, top_k = _require_unpermute(operator, permuted_tokens, sorted_indices, probs)
    out = _sums(permuted_tokens, sorted_indices.view(tokens, top_k), probs).to(permuted_tokens.dtype)
    return out, None if probs is None else permuted_tokens


@formula
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the first result of _npu_moe_token_unpermute, in releases that have no such operator."""
    return _npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)[0]


@formula
def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute npu_moe_token_unpermute_grad_v2 with the number of rows and the dtype taken from permuted_tokens."""
    operator = "npu_moe_token_unpermute_grad"
    _require_dims(operator, (2,), permuted_tokens=permuted_tokens)
    rows, dtype = permuted_tokens.shape[0], permuted_tokens.dtype
    return _unpermute_grad(
        operator, grad_unpermuted_tokens, sorted_indices, rows, dtype, probs, padded_mode, permuted_tokens
    )


@formula
def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``grad_permuted[sorted_indices[t·K + j]] = g[t] · probs[t, j]`` and ``grad_probs[t, j] = Σ_h g[t] ·
    permuted``, in float32, each rounded once to the dtype of its input. There is no grad_probs without probs.

    Rows of grad_permuted that no index names stay unwritten, here NaN; grad_probs of dropped rows is zero. A zero
    probability is no exception here: a NaN in its row is one in grad_probs. The device takes non-empty tensors only.

    Rows are dropped from permuted_tokens_size_0 on, but since CANN 9.1 from the number of indices on: rows behind that
    stay unwritten, and an index beyond the rows reads and writes memory of others. Here that is refused.
    """
    operator = "npu_moe_token_unpermute_grad_v2"
    return _unpermute_grad(
        operator,
        grad_unpermuted_tokens,
        sorted_indices,
        permuted_tokens_size_0,
        permuted_tokens_dtype,
        probs,
        padded_mode,
        permuted_tokens,
    )


def _unpermute_grad(
    operator: str,
    grad: Tensor,
    sorted_indices: Tensor,
    rows: int,
    dtype: torch.dtype,
    probs: Tensor | None,
    padded_mode: bool,
    permuted: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    _require_unpadded(operator, padded_mode)
    _require_dims(operator, (2,), grad_unpermuted_tokens=grad)
    require(grad.dtype == dtype, operator, f"the gradient is {describe(grad)} and permuted_tokens are {dtype}")
    tokens, top_k = _require_unpermute(operator, grad, sorted_indices, probs)
    require(tokens == grad.shape[0], operator, f"the gradient {describe(grad)} does not have {tokens} rows")
    require(grad.numel() > 0 and rows > 0, operator, f"empty: the gradient {describe(grad)}, {rows} permuted rows")
    index = sorted_indices.long()
    # CANN's ops-transformer, moe/moe_token_unpermute_grad/op_host/moe_token_unpermute_grad_tiling.cpp, `numOutTokens`:
    # 9.0.0:299 that of permuted_tokens, 9.1.0:301 that of sorted_indices
    kept = index < (rows if CANN < (9, 1) else index.numel())
    rule = f"sorted_indices names a row beyond the {rows} there are; CANN 9.1 writes behind them"
    require(bool((index[kept] < rows).all()), operator, rule)
    named = index[kept]
    require(named.unique().numel() == named.numel(), operator, "sorted_indices names a row twice")

    if probs is not None:
        # op-plugin 7.2.0, first wheels of 7.3.0, op_plugin_functions.yaml; CANN, moe_token_unpermute_grad_def.cpp
        rule = f"grad_probs has the dtype of the rows, {dtype}, in torch_npu, and that of probs, {probs.dtype}, in CANN"
        require_before((9, 0), probs.dtype == dtype, operator, rule)
    g = grad.float().repeat_interleave(top_k, 0)  # a row for every token and slot
    weighted = g if probs is None else g * probs.float().reshape(-1, 1)
    grad_permuted = torch.full((rows, grad.shape[1]), math.nan, dtype=dtype)
    grad_permuted[named] = weighted[kept].to(dtype)
    if probs is None:
        return grad_permuted, None
    if permuted is None:
        raise RuntimeError(f"{operator}: the gradient of probs needs permuted_tokens")
    fits = permuted.dtype == dtype and list(permuted.shape) == [rows, grad.shape[1]]
    require(fits, operator, f"permuted_tokens is {describe(permuted)}, expected {dtype} {[rows, grad.shape[1]]}")
    grad_probs = torch.zeros(index.shape, dtype=float32)
    grad_probs[kept] = (g[kept] * permuted[named].float()).sum(-1)
    return grad_permuted, grad_probs.view(tokens, top_k).to(probs.dtype)


def _sums(rows: Tensor, index: Tensor, probs: Tensor | None) -> Tensor:
    """Compute Σ_j probs[t, j] · rows[index[t, j]] in float32, slot by slot, without the rows that are not read."""
    total = torch.zeros(index.shape[0], rows.shape[1], dtype=float32)
    for slot in range(index.shape[1]):
        read = index[:, slot] < rows.shape[0]
        if probs is not None:
            read &= probs[:, slot] != 0
        part = rows[index[read, slot].long()].float()
        total[read] += part if probs is None else part * probs[read, slot, None].float()
    return total


def _require_unpermute(operator: str, rows: Tensor, sorted_indices: Tensor, probs: Tensor | None) -> tuple[int, int]:
    """Check the arguments, and return the number of tokens and of slots."""
    if probs is None:
        require_dtypes(operator, {(d, int32) for d in FLOATING}, tokens=rows, sorted_indices=sorted_indices)
        tokens, top_k = sorted_indices.numel(), 1
    else:
        given = {"tokens": rows, "sorted_indices": sorted_indices, "probs": probs}
        require_dtypes(operator, {(d, int32, p) for d in FLOATING for p in FLOATING}, **given)
        _require_dims(operator, (2,), probs=probs)
        tokens, top_k = probs.shape
    _require_top_k(operator, top_k)
    _require_sorted_indices(operator, sorted_indices, tokens, top_k)
    return tokens, top_k


def _require_sorted_indices(operator: str, sorted_indices: Tensor, tokens: int, top_k: int) -> None:
    given = f"got {describe(sorted_indices)} for {tokens} tokens and {top_k} slots"
    require(list(sorted_indices.shape) == [tokens * top_k], operator, f"sorted_indices must have shape [T·K], {given}")
    require_values(
        bool((sorted_indices >= 0).all()), operator, "sorted_indices has a negative element: no row comes before 0"
    )


def _require_top_k(operator: str, top_k: int, low: int = 1) -> None:
    require(low <= top_k <= MAX_TOP_K, operator, f"{top_k} slots for a token; the device takes {low} to {MAX_TOP_K}")


def _require_dims(operator: str, allowed: tuple[int, ...], **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        options = " or ".join(map(str, allowed))
        require(tensor.dim() in allowed, operator, f"{name} must have {options} dimensions, got {describe(tensor)}")


def _require_unpadded(operator: str, padded_mode: bool) -> None:
    require(not padded_mode, operator, "padded_mode is True; the device takes False only")
