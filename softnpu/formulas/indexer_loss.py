"""Define npu_sparse_lightning_indexer_grad_kl_loss: the loss of a lightning indexer, and its gradients.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_sparse_lightning_indexer_grad_kl_loss.md, and
op_plugin/ops/opapi/SparseLightningIndexerGradKLLossKernelNpuOpApi.cpp; CANN's ops-transformer,
attention/sparse_lightning_indexer_grad_kl_loss: op_host for what it takes, of 8.5.0 to 9.1.0, and op_kernel for how
many indices of a query are read (``GetS2SparseLen``) and the least weight in a logarithm (``VectorLoss``).
Inferred: products and sums are in float32, gradients are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, bfloat16, float16, float32, int32

from softnpu.argument_checks import describe, require, require_dtypes, require_values
from softnpu.cann import require_before
from softnpu.formulas import formula
from softnpu.formulas.sparse_attention import INDEX_SIZE, LATENT, RIGHT_DOWN_CAUSAL, ROTARY, UNBOUNDED

LEAST = 1e-8  # of a weight in a logarithm
MOST_QUERIES, MOST_KEYS, MOST_BATCHES = 8192, 2**17, 256
HEADS, INDEX_HEADS = (32, 64, 128), (8, 16, 32, 64)


@formula
def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Any = None,
    actual_seq_klen: Any = None,
    layout: str = "BSND",
    sparse_mode: int = RIGHT_DOWN_CAUSAL,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query_index, key_index and weights, and the sum of the divergences of all queries.

    Of each query as many indices are read as there are keys up to its own.
    """
    operator = "npu_sparse_lightning_indexer_grad_kl_loss"
    if layout == "TND" or sinks is not None:
        raise NotImplementedError(f"{operator}: the software device has neither its layout TND nor sinks")
    require(layout == "BSND", operator, f"the layout must be BSND or TND, got {layout}")
    require(sparse_mode == RIGHT_DOWN_CAUSAL, operator, f"sparse_mode must be 3, got {sparse_mode}")
    if query_rope is None or key_rope is None:
        raise RuntimeError(f"{operator}: query_rope and key_rope must be given")
    halves = {"query": query, "key": key, "query_index": query_index, "key_index": key_index}
    halves |= {"query_rope": query_rope, "key_rope": key_rope}
    require_dtypes(operator, {(dtype,) * 6 for dtype in (float16, bfloat16)}, **halves)
    require(weights.dtype in (query.dtype, float32), operator, "weights must be in the dtype of query, or float32")
    require_before((9, 0), weights.dtype == query.dtype, operator, "weights must be in the dtype of query")
    others = {"sparse_indices": sparse_indices, "softmax_max": softmax_max, "softmax_sum": softmax_sum}
    require_dtypes(operator, {(int32, float32, float32)}, **others)
    (batch, queries, heads, _), keys, index_heads = query.shape, key.shape[1], query_index.shape[2]
    count = sparse_indices.shape[-1]
    shapes: dict[str, tuple[int, ...]] = {
        "query": (batch, queries, heads, LATENT),
        "key": (batch, keys, 1, LATENT),
        "query_index": (batch, queries, index_heads, INDEX_SIZE),
        "key_index": (batch, keys, 1, INDEX_SIZE),
        "query_rope": (batch, queries, heads, ROTARY),
        "key_rope": (batch, keys, 1, ROTARY),
        "weights": (batch, queries, index_heads),
        "sparse_indices": (batch, queries, 1, count),
        "softmax_max": (batch, 1, queries, heads),
        "softmax_sum": (batch, 1, queries, heads),
    }
    for name, tensor in (halves | others | {"weights": weights}).items():
        require(tensor.shape == shapes[name], operator, f"{name} must be {shapes[name]}, got {describe(tensor)}")
        require(tensor.is_contiguous(), operator, f"{name} must be contiguous")
    require(heads in HEADS, operator, f"query must have 32, 64 or 128 heads, got {heads}")
    require(index_heads in INDEX_HEADS, operator, f"query_index must have 8, 16, 32 or 64 heads, got {index_heads}")
    sizes = 1 <= batch <= MOST_BATCHES and 1 <= queries <= MOST_QUERIES and queries <= keys <= MOST_KEYS
    rule = "there must be 1 to 256 batches, 1 to 8192 queries, and as many keys or more, up to 131072"
    require(sizes, operator, f"{rule}, got {batch}, {queries} and {keys}")
    is_step = count % 1024 == 0 and 1024 <= count <= 8192
    require(is_step, operator, f"sparse_indices must be 1024 to 8192 by 1024, got {count}")

    chosen = sparse_indices[:, :, 0].long()
    seen = torch.arange(count) < torch.arange(queries).unsqueeze(-1) + keys - queries + 1
    chosen = chosen.masked_fill(~seen, 0)
    inside = bool(((chosen >= 0) & (chosen < keys)).all())
    require_values(
        inside, operator, f"sparse_indices must be among the {keys} keys where there is a key up to the query's"
    )
    dq, dk, dw = (torch.zeros_like(tensor, dtype=float32) for tensor in (query_index, key_index, weights))
    loss = torch.zeros(1)
    for row in range(batch):
        for q in range(queries):
            own = chosen[row, q][seen[q]]
            attended = torch.cat((key[row, own, 0], key_rope[row, own, 0]), -1).float()
            scores = torch.cat((query[row, q], query_rope[row, q]), -1).float() @ attended.mT * scale_value
            paid = (scores - softmax_max[row, 0, q].unsqueeze(-1)).exp() / softmax_sum[row, 0, q].unsqueeze(-1)
            target = paid.sum(0) / heads
            index_query, index_key = query_index[row, q].float(), key_index[row, own, 0].float()
            products = (index_query @ index_key.mT).relu()
            given = (weights[row, q].float() @ products).softmax(-1)
            least = target.clamp_min(LEAST)
            loss += (least * (least.log() - given.clamp_min(LEAST).log())).sum()
            dscores = given - target
            dw[row, q] = products @ dscores
            dproducts = (weights[row, q].float().unsqueeze(-1) * dscores).masked_fill(products <= 0, 0)
            dq[row, q] = dproducts @ index_key
            dk[row, :, 0].index_add_(0, own, dproducts.mT @ index_query)
    return dq.to(query.dtype), dk.to(key.dtype), dw.to(weights.dtype), loss
