"""Log probabilities of labels, and the entropy beside them, as trainers with rewards and preferences want them."""

from __future__ import annotations

from torch import Tensor

from ._common.autocast import without_autocast
from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .arguments import (
    as_autocast,
    check_head,
    check_labels,
    check_rows,
    logits_budget,
    make_objective,
    reduce_loss,
    refuse_labels_beyond,
)
from .autograd.vocab_chunks import LinearCrossEntropy
from .functional import linear_cross_entropy
from .ops import chunking, reference
from .shard import Shard


def linear_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    shard: Shard | None = None,
    pieces: int | None = None,
) -> Tensor:
    """Compute the log probability that a head gives to each label, without a tensor of all logits. Differentiable.

    It is what DPO, GRPO and KTO make of logits: ``log_softmax(logits / temperature)`` at the labels, with
    ``logit_scale=1 / temperature``.

    Args:
        hidden_states: ``[..., H]``, floating point.
        weight: as for `linear_cross_entropy`, as are all others.
        labels: ``[...]``, integers in ``[0, V)``, or ``ignore_index``, for which the result is zero. With others it
            is NaN, and its gradient zero.

    Returns:
        The shape of labels, float32.

    Raises:
        TypeError: as for `cross_entropy`.
        ValueError: as for `cross_entropy`.
        IndexError: as for `cross_entropy`.

    Example:
        >>> import torch
        >>> hidden = torch.randn(2, 3, 16, dtype=torch.bfloat16, device="npu")
        >>> weight = torch.randn(50, 16, dtype=torch.bfloat16, device="npu")
        >>> linear_log_probs(hidden, weight, torch.ones(2, 3, dtype=torch.long, device="npu")).shape
        torch.Size([2, 3])
    """
    check_rows("linear_log_probs", hidden_states, "labels", labels.shape)
    rows = linear_cross_entropy(
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        weight,
        labels.reshape(-1),
        bias,
        ignore_index=ignore_index,
        reduction="none",
        logit_scale=logit_scale,
        softcap=softcap,
        shard=shard,
        pieces=pieces,
    )
    return -rows.view(labels.shape)


def linear_log_probs_and_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    pieces: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `linear_log_probs` and the entropy of the head's words, from the same logits. Both are differentiable.

    It is what PPO and GRPO want: with ``logit_scale=1 / temperature`` the entropy ``-Σ p · log p`` of
    ``softmax(logits / temperature)``. Its gradient is computed where one arrives only, in the pass of that of the log
    probabilities. The vocabulary is cut, and logits are kept, as for a trained head in `linear_cross_entropy`. Second
    derivatives, torch.func and DTensors get the formula in torch, with all logits.

    Args:
        hidden_states: ``[..., H]``, floating point.
        weight: ``[V, H]``, in the same dtype. Logits have to be finite.
        labels: ``[...]``, integers in ``[0, V)``, or ``ignore_index``, for which both results are zero. With others
            the log probability is NaN, and its gradient zero.
        bias: ``[V]``, in the same dtype.
        ignore_index: as for `linear_cross_entropy`, as are all others.

    Returns:
        Log probabilities and entropies, each in the shape of labels, float32, float64 for float64.

    Raises:
        TypeError: as for `cross_entropy`.
        ValueError: as for `cross_entropy`.
        IndexError: as for `cross_entropy`.

    Example:
        >>> import torch
        >>> hidden = torch.randn(2, 3, 16, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> weight = torch.randn(50, 16, dtype=torch.bfloat16, device="npu")
        >>> labels = torch.ones(2, 3, dtype=torch.long, device="npu")
        >>> log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, labels)
        >>> (-log_probs.mean() - 0.01 * entropy.mean()).backward()
    """
    name = "linear_log_probs_and_entropy"
    check_rows(name, hidden_states, "labels", labels.shape)
    shape, hidden_states, labels = labels.shape, hidden_states.reshape(-1, hidden_states.shape[-1]), labels.flatten()
    check_labels(name, hidden_states, labels)
    check_head(name, hidden_states, weight, bias, pieces)
    objective = make_objective(name, ignore_index, 0.0, 0.0, logit_scale, softcap)
    labels = labels.long()
    refuse_labels_beyond(name, labels, weight.shape[0], ignore_index)
    hidden_states, weight, bias = as_autocast(name, hidden_states, weight, bias)
    if is_transformed() or is_distributed(hidden_states, weight, labels):
        rows, entropy = reference.linear_loss_and_entropy(hidden_states, weight, bias, labels, objective)
    else:
        chunks = pieces or chunking.vocab_chunk_count(hidden_states.shape[0], weight.shape[0])
        budget = 0 if pieces else logits_budget(hidden_states, weight, bias)
        with without_autocast(hidden_states), unseen_by_checkpoints():
            options = objective, None, chunks, budget, True
            rows, entropy = LinearCrossEntropy.apply(hidden_states, weight, bias, labels, *options)
    rows = reduce_loss(rows, labels, weight.shape[0], objective, "none", None)
    return -rows.view(shape), entropy.view(shape)
