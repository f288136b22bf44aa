"""Distillation: what a student's head and a teacher's differ by, without the logits of either."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import in_torch
from . import pieces as pieces_of
from ._common.autocast import without_autocast
from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import by_formula, gradients, is_transformed
from ._common.distributed import is_distributed
from .arguments import (
    as_autocast,
    check_head,
    check_reduction,
    check_rows,
    kept,
    objective_of,
    over_rows,
)
from .divergence import Divergence, Statistics
from .float16 import brought_within, power_of_two
from .objective import statistics_dtype


class LinearDivergence(torch.autograd.Function):
    """Computes what the distributions of two heads differ by in each row ``[N]``, in pieces of tokens.

    The logits of each piece make its rows and, before they are freed, the gradient of the student's: of it that of the
    hidden states. Where the weight is trained it is kept for the backward in the dtype of the head, up to ``budget``
    bytes; of rows behind these the logits are computed again there. As in linear.py, each row of the weight's gradient
    is one product, rounded once.

    ``apply(hidden_states, weight, bias, teacher_hidden_states, teacher_weight, teacher_bias, divergence, unit, pieces,
    words, budget)`` takes ``[N, H]``, ``[V, H]``, ``[V]`` or None, the same of the teacher, the options, what gradients
    are multiplied with before they are rounded, of no dimension, in how many pieces tokens are cut and, in the
    backward, words, and how many bytes of gradients are kept.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden_states: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        divergence: Divergence,
        unit: Tensor,
        number: int,
        words: int,
        budget: int,
    ) -> Tensor:
        needs_hidden, *others = ctx.needs_input_grad[:3]
        slope = torch.empty_like(hidden_states) if needs_hidden else None
        found, kept = [], []
        for rows in pieces_of.of_rows(hidden_states.shape[0], number):
            x = F.linear(hidden_states[rows], weight, bias)
            y = F.linear(teacher_hidden_states[rows], teacher_weight, teacher_bias)
            found.append(divergence.overwrite(x, y, unit))
            if slope is not None:
                torch.mm(x, weight, out=slope[rows])
            if any(others) and (budget := budget - x.numel() * x.element_size()) >= 0:
                kept.append(x)
            del x, y
        known = Statistics(*(torch.cat(each) for each in zip(*found)))
        ctx.options = divergence, words
        heads = hidden_states, weight, bias, teacher_hidden_states, teacher_weight, teacher_bias
        ctx.save_for_backward(*heads, slope, unit, *known, *kept)
        return known.divergence.squeeze(-1).clone()  # no view: autograd lets nobody write to one that a node gives

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpoints refuse a second look
        hidden_states, weight, bias, *teacher, slope, unit = saved[:8]
        divergence, words = ctx.options
        needs, nothing = ctx.needs_input_grad[:3], (None,) * 8
        if by_formula(grad):
            found = gradients(
                lambda h, w, b: in_torch.linear_divergence(h, w, b, *teacher, divergence),
                (hidden_states, weight, bias),
                needs,
                grad,
            )
            return *found, *nothing
        factor = (grad * -divergence.factor / unit).unsqueeze(-1)
        d_hidden = None if slope is None else (slope * factor).to(hidden_states.dtype)
        if not any(needs[1:]):
            return d_hidden, None, None, *nothing
        known, kept = Statistics(*saved[8:12]), saved[12:]
        done = sum(x.shape[0] for x in kept)
        rest = slice(done, None)
        steep, beyond = brought_within(hidden_states * factor, weight.dtype)
        share, beyond_share = brought_within(factor.t(), weight.dtype)
        d_weight = torch.empty_like(weight) if needs[1] else None
        d_bias = torch.empty_like(bias) if needs[2] else None
        for part in pieces_of.of_words(weight.shape[0], words):
            found = [x[:, part] for x in kept]
            if done < hidden_states.shape[0]:
                x, y = (
                    F.linear(h[rest], w[part], None if b is None else b[part])
                    for h, w, b in ((hidden_states, weight, bias), teacher)
                )
                divergence.overwrite(x, y, unit, known.rows(rest))
                found.append(x)
            x = torch.cat(found)
            if d_weight is not None:
                torch.mm(x.t(), steep, out=d_weight[part])
            if d_bias is not None:
                torch.mm(share, x, out=d_bias[part].unsqueeze(0))
        for gradient, times in ((d_weight, beyond), (d_bias, beyond_share)):
            if gradient is not None and times is not None:
                gradient.mul_(times)
        return d_hidden, d_weight, d_bias, *nothing


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
        objective_of(name, ignore_index, 0.0, 0.0, logit_scale, softcap),
        objective_of(f"{name}, teacher", ignore_index, 0.0, 0.0, teacher_logit_scale, teacher_softcap),
    )
    shape = hidden_states.shape[:-1]
    student = as_autocast(name, hidden_states.reshape(-1, hidden_states.shape[-1]), weight, bias)
    given = teacher_hidden_states.reshape(-1, teacher_hidden_states.shape[-1]), teacher_weight, teacher_bias
    teacher = as_autocast(name, *(each if each is None else each.detach() for each in given), whose="teacher_")
    counted = None if labels is None else labels.reshape(-1) != ignore_index
    if reduction == "batchmean" and num_items is None:
        num_items = max(student[0].shape[0], 1) if counted is None else counted.sum().clamp(min=1)
    if is_transformed() or is_distributed(*student, *teacher):
        rows = in_torch.linear_divergence(*student, *teacher, divergence)
    else:
        if not torch.is_grad_enabled():
            student = tuple(each if each is None else each.detach() for each in student)
        size = student[0].shape[0], weight.shape[0]
        number, words = pieces or pieces_of.of_tokens(2 * size[0], size[1]), pieces or pieces_of.how_many(*size)
        with without_autocast(hidden_states), unseen_by_checkpoints():
            one = torch.full((), divergence.factor, dtype=statistics_dtype(student[0].dtype), device=weight.device)
            unit = over_rows(one, reduction, num_items)
            unit = unit / power_of_two(unit)  # a mantissa: what is multiplied with the rest is not rounded by it
            budget = 0 if pieces else kept(*student)
            rows = LinearDivergence.apply(*student, *teacher, divergence, unit, number, words, budget)
    if counted is not None:
        rows = torch.where(counted, rows, 0.0)
    rows = over_rows(rows, reduction, num_items)
    return rows.view(shape) if reduction == "none" else rows


def _check(name: str, hidden_states: Tensor, teacher_hidden_states: Tensor, labels: Tensor | None) -> None:
    """Refuse hidden states that do not fit to each other, or to labels."""
    for tensor in (hidden_states, teacher_hidden_states):
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected floating point, got {tensor.dtype}")
    check_rows(name, hidden_states, "the rows of teacher_hidden_states", teacher_hidden_states.shape[:-1])
    if labels is not None:
        check_rows(name, hidden_states, "labels", labels.shape)
