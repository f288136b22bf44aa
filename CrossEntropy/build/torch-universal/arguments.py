"""What the public functions share: checks of their arguments, autocast, and the reduction over rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._common.autocast import autocast_dtype
from ._common.derivatives import is_transformed, needs_grad
from .ops import chunking
from .ops.objective import Objective


def reduce_loss(
    rows: Tensor, labels: Tensor, words: int, objective: Objective, reduction: str, num_items: float | Tensor | None
) -> Tensor:
    """Reduce the loss of each row ``[N]``; a label that is no word makes it NaN, and its gradient zero."""
    counted = labels != objective.ignore_index
    rows = torch.where(counted & ((labels < 0) | (labels >= words)), math.nan, rows)
    if reduction == "mean" and num_items is None:
        num_items = counted.sum()
    return reduce_rows(rows, reduction, num_items)


def reduce_rows(rows: Tensor, reduction: str, num_items: float | Tensor | None) -> Tensor:
    """Reduce rows to each of them, their sum, or that divided by ``num_items``, which the mean needs alone."""
    if reduction == "none":
        return rows
    total = rows.sum()
    if reduction == "sum":
        return total
    assert num_items is not None
    if isinstance(num_items, Tensor):
        num_items = num_items.to(total.device).reshape(())
    return total / num_items


def refuse_labels_beyond(name: str, labels: Tensor, words: int, ignore_index: int) -> None:
    """Raise where a label is no word, if that can be known: on the host, or where torch looks for anomalies.

    On the NPU the host waits for it then; without `torch.autograd.detect_anomaly` it never does.
    """
    if torch.compiler.is_compiling() or not (labels.device.type == "cpu" or torch.is_anomaly_enabled()):
        return
    if is_transformed() or type(labels) is not Tensor:  # of which the host has no values, or not all
        return
    rows = ((labels != ignore_index) & ((labels < 0) | (labels >= words))).nonzero()
    if rows.numel():
        row = int(rows[0])
        raise IndexError(
            f"{name}: the loss is nan: label {int(labels[row])} of row {row} is none of the {words} words, which begin "
            f"with 0, nor ignore_index {ignore_index}; so it is in {len(rows)} of {len(labels)} rows"
        )


def make_objective(
    name: str, ignore_index: int, label_smoothing: float, z_loss: float, logit_scale: float, softcap: float | None
) -> Objective:
    """Return the options of a loss, or refuse them."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be between 0 and 1, got {label_smoothing}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap must be positive or None, got {softcap}")
    return Objective(ignore_index, label_smoothing, z_loss, logit_scale, softcap)


def check_labels(name: str, tokens: Tensor, labels: Tensor) -> None:
    """Refuse tokens that are not ``[N, ...]`` in floating point, and labels that are not integers ``[N]``."""
    if not tokens.is_floating_point():
        raise TypeError(f"{name}: expected floating point, got {tokens.dtype}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise TypeError(f"{name}: labels must be integers, got {labels.dtype}")
    if tokens.dim() != 2 or labels.shape != tokens.shape[:1]:
        raise ValueError(f"{name}: expected [N, ...] with labels [N], got {list(tokens.shape)}, {list(labels.shape)}")
    if not tokens.shape[1]:
        raise ValueError(f"{name}: expected [N, ...] of at least one value a row, got {list(tokens.shape)}")
    if labels.device != tokens.device:
        raise ValueError(f"{name}: labels must be on {tokens.device}, got {labels.device}")


def check_head(
    name: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, pieces: int | None, whose: str = ""
) -> None:
    """Refuse a weight and a bias that do not fit to hidden states ``[N, H]``, and fewer than one piece."""
    if weight.dim() != 2 or not weight.shape[0] or weight.shape[1] != hidden_states.shape[-1]:
        raise ValueError(f"{name}: {whose}weight must be [V, {hidden_states.shape[-1]}], got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: {whose}bias must be {list(weight.shape[:1])}, got {list(bias.shape)}")
    if pieces is not None and pieces < 1:
        raise ValueError(f"{name}: pieces must be at least 1, got {pieces}")


def check_rows(name: str, hidden_states: Tensor, what: str, shape: torch.Size) -> None:
    """Refuse what has other rows than hidden states ``[..., H]``."""
    if not hidden_states.dim() or not hidden_states.shape[-1]:
        raise ValueError(
            f"{name}: hidden_states must be [..., H] with H of at least 1, got {list(hidden_states.shape)}"
        )
    if shape != hidden_states.shape[:-1]:
        raise ValueError(f"{name}: {what} must be {list(hidden_states.shape[:-1])}, got {list(shape)}")


def check_reduction(name: str, reduction: str, num_items: float | Tensor | None, mean: str = "mean") -> None:
    """Refuse a reduction that there is not; ``mean`` is the name of that over rows."""
    if reduction not in ("none", mean, "sum"):
        raise ValueError(f"{name}: reduction must be one of none, {mean}, sum, got {reduction!r}")
    if num_items is not None and reduction != mean:
        raise ValueError(f"{name}: num_items is what reduction={mean!r} divides by, but reduction is {reduction!r}")


def is_frozen(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether the hidden states alone take a gradient."""
    return hidden_states.requires_grad and not (weight.requires_grad or (bias is not None and bias.requires_grad))


def logits_budget(*tensors: Tensor | None) -> int:
    """Return how many bytes of logits are kept for a backward: none in a graph, where they cannot be overwritten."""
    return chunking.LOGITS_BUDGET if needs_grad(*tensors) and not torch.compiler.is_compiling() else 0


def as_autocast(
    name: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, whose: str = ""
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the tensors of a head as autocast casts those of a linear layer, and refuse what they differ in then."""
    dtype = autocast_dtype(hidden_states)
    if dtype is not None:
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    given = [tensor for tensor in (hidden_states, weight, bias) if tensor is not None]
    for what, found in (("dtype", {t.dtype for t in given}), ("device", {t.device for t in given})):
        if len(found) > 1:
            kinds = ", ".join(sorted(map(str, found)))
            raise ValueError(f"{name}: {whose}hidden_states, {whose}weight and bias must have one {what}, got {kinds}")
    return hidden_states, weight, bias
