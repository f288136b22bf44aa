"""Cross entropy as functions of tensors, with the names and defaults of torch.nn.functional."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from . import in_torch
from . import pieces as pieces_of
from .distributed import is_distributed
from .frozen import FrozenLinearCrossEntropy
from .linear import LinearCrossEntropy
from .objective import Objective
from .rows import CrossEntropy
from .shard import Shard
from .transforms import is_transformed

_REDUCTIONS = ("none", "mean", "sum")


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
        labels: ``[N]``, integers in ``[0, V)`` or ``ignore_index``. Others give NaN: the host does not read them.
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

    Example:
        >>> import torch
        >>> logits = torch.randn(6, 50, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> cross_entropy(logits, torch.tensor([1, 2, -100, 4, 5, 6], device="npu")).backward()
    """
    _check_labels("cross_entropy", logits, labels)
    objective = _objective("cross_entropy", ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    _check_reduction("cross_entropy", reduction, num_items)
    labels = labels.long()
    if is_transformed() or is_distributed(logits, labels):
        rows = in_torch.loss(logits, labels, objective)
    else:
        with _without_autocast(logits):
            rows = CrossEntropy.apply(logits, labels, objective)
    return _reduced(rows, labels, logits.shape[-1], objective, reduction, num_items)


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
    """Compute ``cross_entropy(linear(hidden_states, weight, bias), labels)`` without a tensor of all logits.

    A head that is trained takes the vocabulary in pieces, and keeps logits for its backward up to 2.25 GiB; of those
    beyond, it computes each again. One that is not takes the tokens in pieces, and computes the gradient of the hidden
    states in the forward. Logits are rounded to the dtype of the hidden states, as a head's are; statistics are
    float32. Only the gradients that are wanted are computed. Differentiable twice, but with a shard; whoever does so,
    transforms it by torch.func or has DTensors gets the formula in torch, with all logits. Autocast casts hidden
    states, weight and bias as it casts those of a linear layer.

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

    Example:
        >>> import torch
        >>> hidden = torch.randn(6, 16, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> weight = torch.randn(50, 16, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> linear_cross_entropy(hidden, weight, torch.arange(6, device="npu")).backward()
    """
    name = "linear_cross_entropy"
    _check_labels(name, hidden_states, labels)
    if weight.dim() != 2 or weight.shape[1] != hidden_states.shape[1]:
        raise ValueError(f"{name}: weight must be [V, {hidden_states.shape[1]}], got {list(weight.shape)}")
    if pieces is not None and pieces < 1:
        raise ValueError(f"{name}: pieces must be at least 1, got {pieces}")
    objective = _objective(name, ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    _check_reduction(name, reduction, num_items)
    labels = labels.long()
    hidden_states, weight, bias = _as_autocast(hidden_states, weight, bias)
    if is_transformed() or is_distributed(hidden_states, weight, labels):
        if shard is not None:
            raise ValueError(f"{name}: a shard is neither transformed by torch.func nor a DTensor")
        rows = in_torch.linear_loss(hidden_states, weight, bias, labels, objective)
    else:
        size = hidden_states.shape[0], weight.shape[0]
        with _without_autocast(hidden_states):
            if shard is None and torch.is_grad_enabled() and _is_frozen(hidden_states, weight, bias):
                number = pieces or pieces_of.of_tokens(*size)
                rows = FrozenLinearCrossEntropy.apply(hidden_states, weight, bias, labels, objective, number)
            else:
                number = pieces or pieces_of.how_many(*size)
                budget = 0 if pieces else _kept(hidden_states, weight, bias)
                rows = LinearCrossEntropy.apply(hidden_states, weight, bias, labels, objective, shard, number, budget)
    words = weight.shape[0] if shard is None else shard.words
    return _reduced(rows, labels, words, objective, reduction, num_items)


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
        labels: ``[...]``, integers in ``[0, V)``, or ``ignore_index``, for which the result is zero.

    Returns:
        The shape of labels, float32.

    Raises:
        TypeError: as for `cross_entropy`.
        ValueError: as for `cross_entropy`.

    Example:
        >>> import torch
        >>> hidden = torch.randn(2, 3, 16, dtype=torch.bfloat16, device="npu")
        >>> weight = torch.randn(50, 16, dtype=torch.bfloat16, device="npu")
        >>> linear_log_probs(hidden, weight, torch.ones(2, 3, dtype=torch.long, device="npu")).shape
        torch.Size([2, 3])
    """
    if labels.shape != hidden_states.shape[:-1]:
        raise ValueError(f"linear_log_probs: labels must be {list(hidden_states.shape[:-1])}, got {list(labels.shape)}")
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


def _reduced(
    rows: Tensor, labels: Tensor, words: int, objective: Objective, reduction: str, num_items: float | Tensor | None
) -> Tensor:
    counted = labels != objective.ignore_index
    rows = torch.where(counted & ((labels < 0) | (labels >= words)), math.nan, rows)
    if reduction == "none":
        return rows
    total = rows.sum()
    if reduction == "sum":
        return total
    if num_items is None:
        return total / counted.sum()
    if isinstance(num_items, Tensor):
        num_items = num_items.to(total.device).reshape(())
    return total / num_items


def _objective(
    name: str, ignore_index: int, label_smoothing: float, z_loss: float, logit_scale: float, softcap: float | None
) -> Objective:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be between 0 and 1, got {label_smoothing}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap must be positive or None, got {softcap}")
    return Objective(ignore_index, label_smoothing, z_loss, logit_scale, softcap)


def _check_labels(name: str, tokens: Tensor, labels: Tensor) -> None:
    if not tokens.is_floating_point():
        raise TypeError(f"{name}: expected floating point, got {tokens.dtype}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise TypeError(f"{name}: labels must be integers, got {labels.dtype}")
    if tokens.dim() != 2 or labels.shape != tokens.shape[:1]:
        raise ValueError(f"{name}: expected [N, ...] with labels [N], got {list(tokens.shape)}, {list(labels.shape)}")


def _check_reduction(name: str, reduction: str, num_items: float | Tensor | None) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"{name}: num_items is what reduction='mean' divides by, but reduction is {reduction!r}")


def _is_frozen(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether the hidden states alone take a gradient."""
    return hidden_states.requires_grad and not (weight.requires_grad or (bias is not None and bias.requires_grad))


def _kept(*tensors: Tensor | None) -> int:
    """Return how many bytes of logits are kept for a backward: none in a graph, where they cannot be overwritten."""
    needed = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return pieces_of.KEPT if needed and not torch.compiler.is_compiling() else 0


def _without_autocast(tensor: Tensor) -> torch.autocast:
    device = tensor.device.type if is_autocast_available(tensor.device.type) else "cpu"
    return torch.autocast(device, enabled=False)


def _as_autocast(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = hidden_states.device.type
    if not is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return hidden_states, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
