"""Cross entropy as functions of tensors, with the names and defaults of torch.nn.functional."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._common.autocast import without_autocast
from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .arguments import (
    as_autocast,
    check_head,
    check_labels,
    check_reduction,
    is_frozen,
    logits_budget,
    make_objective,
    reduce_loss,
    refuse_labels_beyond,
)
from .autograd.logits_loss import CrossEntropy
from .autograd.token_chunks import LinearCrossEntropyByTokens
from .autograd.vocab_chunks import LinearCrossEntropy
from .ops import chunking, reference
from .shard import Shard


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Compute the cross entropy of logits, with statistics in float32 a few rows at a time. Differentiable, twice too.

    Args:
        logits: ``[N, V]``, floating point.
        labels: ``[N]``, integers in ``[0, V)`` or ``ignore_index``. With others the loss of a row is NaN, and with it
            that of all; their rows get gradients of zero, and change no other. The host does not read labels on the
            NPU: `torch.autograd.detect_anomaly` lets it look for such ones.
        ignore_index: the label of rows that do not count: their loss and gradients are zero.
        reduction: "none" for the loss of each row, "sum", or "mean" over the rows that count; of none that is NaN.
        label_smoothing: the part of a label that all words share, in ``[0, 1]``.
        z_loss: the weight of ``(log Σ exp)²``, which is added to the loss of a row (PaLM, arXiv:2204.02311, section 5).
        logit_scale: what logits are multiplied with first.
        softcap: logits become ``softcap · tanh(logits / softcap)`` then (Gemma 2, arXiv:2408.00118, section 2).
        num_items: what "mean" divides by in place of the number of rows that count: a number, or a tensor of one
            element, which the host does not read.

    Returns:
        float32, float64 for float64: ``[N]`` with reduction "none", otherwise of no dimension.

    Raises:
        TypeError: logits are not floating point, or labels not integers.
        ValueError: shapes, the reduction or an option are none of those above.
        IndexError: a label on the host, or while anomalies are detected on the NPU, is no word; it names the row.

    Example:
        >>> import torch
        >>> logits = torch.randn(6, 50, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> cross_entropy(logits, torch.tensor([1, 2, -100, 4, 5, 6], device="npu")).backward()
    """
    check_labels("cross_entropy", logits, labels)
    objective = make_objective("cross_entropy", ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    check_reduction("cross_entropy", reduction, num_items)
    labels = labels.long()
    refuse_labels_beyond("cross_entropy", labels, logits.shape[1], ignore_index)
    if is_transformed() or is_distributed(logits, labels):
        rows = reference.logits_loss(logits, labels, objective)
    else:
        with without_autocast(logits):
            rows = CrossEntropy.apply(logits, labels, objective)
    return reduce_loss(rows, labels, logits.shape[-1], objective, reduction, num_items)


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    num_items: float | Tensor | None = None,
    shard: Shard | None = None,
    pieces: int | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(hidden_states, weight, bias), labels)`` without a tensor of all logits in float32.

    It takes the tokens in pieces, and computes the gradient of the hidden states in the forward. Where the head is
    trained it keeps the gradient of all logits for the backward, if that fits into 2.25 GiB; if not, it takes the
    vocabulary in pieces, keeps as many logits, and computes those beyond again. Logits are rounded to the dtype of the
    hidden states, as a head's are, and so is their gradient; statistics are float32. Only the gradients that are wanted
    are computed. Differentiable twice, but with a shard; whoever does so, transforms it by torch.func or has DTensors
    gets the formula in torch, with all logits. Autocast casts hidden states, weight and bias as it casts those of a
    linear layer.

    Args:
        hidden_states: ``[N, H]``, floating point.
        weight: ``[V, H]``, in the same dtype.
        labels: as for `cross_entropy`.
        bias: ``[V]``, in the same dtype.
        ignore_index: as for `cross_entropy`, as are all options up to ``num_items``.
        shard: which words the rows of ``weight`` are, where they are not all. Every shard's process has to call this
            with the same hidden states and labels; the gradient of the hidden states is that over all shards.
        pieces: in how many the vocabulary, or the tokens, are cut; by default two or more, by size. Where they are
            given no logits are kept, and more pieces take less memory.

    Returns:
        As for `cross_entropy`.

    Raises:
        TypeError: as for `cross_entropy`.
        ValueError: as for `cross_entropy`.
        IndexError: as for `cross_entropy`.

    Example:
        >>> import torch
        >>> hidden = torch.randn(6, 16, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> weight = torch.randn(50, 16, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> linear_cross_entropy(hidden, weight, torch.arange(6, device="npu")).backward()
    """
    name = "linear_cross_entropy"
    check_labels(name, hidden_states, labels)
    check_head(name, hidden_states, weight, bias, pieces)
    objective = make_objective(name, ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    check_reduction(name, reduction, num_items)
    labels = labels.long()
    words = weight.shape[0] if shard is None else shard.words
    refuse_labels_beyond(name, labels, words, ignore_index)
    hidden_states, weight, bias = as_autocast(name, hidden_states, weight, bias)
    if is_transformed() or is_distributed(hidden_states, weight, labels):
        if shard is not None:
            raise ValueError(f"{name}: a shard is neither transformed by torch.func nor a DTensor")
        rows = reference.linear_loss(hidden_states, weight, bias, labels, objective)
    else:
        size = hidden_states.shape[0], weight.shape[0]
        budget = 0 if pieces else logits_budget(hidden_states, weight, bias)
        fits = math.prod(size) * weight.element_size() <= budget
        is_untrained = torch.is_grad_enabled() and is_frozen(hidden_states, weight, bias)
        with without_autocast(hidden_states), unseen_by_checkpoints():
            if shard is None and (fits or is_untrained):
                chunks = pieces or chunking.token_chunk_count(*size)
                rows = LinearCrossEntropyByTokens.apply(hidden_states, weight, bias, labels, objective, chunks)
            else:
                chunks = pieces or chunking.vocab_chunk_count(*size)
                options = objective, shard, chunks, budget, False
                rows = LinearCrossEntropy.apply(hidden_states, weight, bias, labels, *options)
    with unseen_by_checkpoints():  # deferred logits mark the loss as written to
        return reduce_loss(rows, labels, words, objective, reduction, num_items)
