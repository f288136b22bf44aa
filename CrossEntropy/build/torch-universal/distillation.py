"""Distillation: the divergence of a student's head and a teacher's, without the logits of either."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.autocast import without_autocast
from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .arguments import (
    as_autocast,
    check_head,
    check_reduction,
    check_rows,
    logits_budget,
    make_objective,
    reduce_rows,
)
from .autograd.linear_jsd import LinearGeneralizedJSD
from .ops import chunking, reference
from .ops.divergence import Divergence
from .ops.float16_range import power_of_two
from .ops.objective import statistics_dtype


def linear_generalized_jsd(
    hidden_states: Tensor,
    weight: Tensor,
    teacher_hidden_states: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    num_items: float | Tensor | None = None,
    pieces: int | None = None,
) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence of a student's head and a teacher's, without their logits.

    It is what TRL's ``GKDTrainer.generalized_jsd_loss`` makes of logits (Agarwal et al., arXiv:2306.13649), with
    ``logit_scale=1 / temperature`` and no factor for the temperature. The gradient of the hidden states is computed in
    the forward; that of the student's weight takes up to 2.25 GiB in between. The teacher gets none. Differentiable
    twice; second derivatives, torch.func and DTensors get the formula in torch, with all logits. Autocast casts hidden
    states, weights and biases as it casts those of linear layers.

    Args:
        hidden_states: the student's, ``[..., H]``, floating point.
        weight: of the student's head, ``[V, H]``, in the same dtype. Logits have to be finite.
        teacher_hidden_states: the teacher's of the same tokens, ``[..., G]``, floating point.
        teacher_weight: of the teacher's head, ``[V, G]``, in the dtype of its hidden states.
        labels: ``[...]``; where they are ``ignore_index`` rows do not count: divergence and gradients are zero. Else
            nothing is read of them. None where all rows count.
        bias: of the student's head, ``[V]``, in the same dtype.
        teacher_bias: of the teacher's head, ``[V]``, in the same dtype.
        beta: the teacher's part of the mixture, in ``[0, 1]``: ``beta · KL(teacher ‖ mixture) + (1 - beta) ·
            KL(student ‖ mixture)``; with 0 the forward ``KL(teacher ‖ student)``, with 1 ``KL(student ‖ teacher)``.
        ignore_index: the label of rows that do not count.
        reduction: "none" for each row, "sum", or "batchmean" over the rows that count, zero where none does.
        logit_scale: what the logits of the student are multiplied with first.
        softcap: logits of the student become ``softcap · tanh(logits / softcap)`` then.
        teacher_logit_scale: as ``logit_scale``, which it is by default.
        teacher_softcap: as ``softcap``, for the teacher.
        num_items: what "batchmean" divides by in place of the number of rows that count: a number, or a tensor of one
            element, which the host does not read.
        pieces: in how many tokens are cut; by default two or more, by size. Where they are given no gradient is kept
            for that of the weight, and more pieces take less memory.

    Returns:
        float32, float64 for float64: ``[...]`` with reduction "none", otherwise of no dimension.

    Raises:
        TypeError: hidden states are not floating point.
        ValueError: shapes, beta, the reduction or an option are none of those above.

    Example:
        >>> import torch
        >>> hidden = torch.randn(2, 3, 16, dtype=torch.bfloat16, device="npu", requires_grad=True)
        >>> teacher = torch.randn(2, 3, 32, dtype=torch.bfloat16, device="npu")
        >>> heads = [torch.randn(50, n, dtype=torch.bfloat16, device="npu") for n in (16, 32)]
        >>> linear_generalized_jsd(hidden, heads[0], teacher, heads[1], beta=0.1).backward()
    """
    name = "linear_generalized_jsd"
    _check(name, hidden_states, teacher_hidden_states, labels)
    check_head(name, hidden_states, weight, bias, pieces)
    if teacher_weight.dim() and weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"{name}: weight has {weight.shape[0]} words, teacher_weight {teacher_weight.shape[0]}: both heads need "
            "the same vocabulary; cut off the rows that only pad one of them"
        )
    check_head(name, teacher_hidden_states, teacher_weight, teacher_bias, pieces, "teacher_")
    if not 0 <= beta <= 1:
        raise ValueError(f"{name}: beta must be between 0 and 1, got {beta}")
    if not logit_scale:
        raise ValueError(f"{name}: logit_scale must not be zero, which leaves nothing to learn")
    check_reduction(name, reduction, num_items, mean="batchmean")
    teacher_logit_scale = logit_scale if teacher_logit_scale is None else teacher_logit_scale
    divergence = Divergence(
        float(beta),
        make_objective(name, ignore_index, 0.0, 0.0, logit_scale, softcap),
        make_objective(f"{name}, teacher", ignore_index, 0.0, 0.0, teacher_logit_scale, teacher_softcap),
    )
    shape = hidden_states.shape[:-1]
    student = as_autocast(name, hidden_states.reshape(-1, hidden_states.shape[-1]), weight, bias)
    given = teacher_hidden_states.reshape(-1, teacher_hidden_states.shape[-1]), teacher_weight, teacher_bias
    teacher = as_autocast(name, *(each if each is None else each.detach() for each in given), whose="teacher_")
    counted = None if labels is None else labels.reshape(-1) != ignore_index
    if reduction == "batchmean" and num_items is None:
        num_items = max(student[0].shape[0], 1) if counted is None else counted.sum().clamp(min=1)
    if is_transformed() or is_distributed(*student, *teacher):
        rows = reference.head_divergence(divergence, teacher, *student)
    else:
        if not torch.is_grad_enabled():
            student = tuple(each if each is None else each.detach() for each in student)
        size = student[0].shape[0], weight.shape[0]
        token_chunks = pieces or chunking.token_chunk_count(2 * size[0], size[1])
        vocab_chunks = pieces or chunking.vocab_chunk_count(*size)
        with without_autocast(hidden_states), unseen_by_checkpoints():
            one = torch.full((), divergence.factor, dtype=statistics_dtype(student[0].dtype), device=weight.device)
            scale = reduce_rows(one, reduction, num_items)
            scale = scale / power_of_two(scale)  # a mantissa: what is multiplied with the rest is not rounded by it
            budget = 0 if pieces else logits_budget(*student)
            options = divergence, scale, token_chunks, vocab_chunks, budget
            rows = LinearGeneralizedJSD.apply(*student, *teacher, *options)
    if counted is not None:
        rows = torch.where(counted, rows, 0.0)
    rows = reduce_rows(rows, reduction, num_items)
    return rows.view(shape) if reduction == "none" else rows


def _check(name: str, hidden_states: Tensor, teacher_hidden_states: Tensor, labels: Tensor | None) -> None:
    """Refuse hidden states that do not fit to each other, or to labels."""
    for tensor in (hidden_states, teacher_hidden_states):
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected floating point, got {tensor.dtype}")
    check_rows(name, hidden_states, "the rows of teacher_hidden_states", teacher_hidden_states.shape[:-1])
    if labels is not None:
        check_rows(name, hidden_states, "labels", labels.shape)
