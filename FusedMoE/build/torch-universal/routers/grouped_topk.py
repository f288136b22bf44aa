"""The gating of DeepSeek and its relatives in one launch: scores, a bias for the choice, groups of experts, a scale.

``npu_moe_gating_top_k`` computes it. Its own derivative, where a release has one, reads a result that the device leaves
unwritten unless ``out_flag`` is set, takes sigmoids only and has no meta kernel: here the gradient is computed by
operators of torch, from the few scores that were chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._common.cann import CANN
from .._common.derivatives import by_formula, gradients, is_transformed
from .._common.distributed import is_distributed

# op-plugin 7.1.0, of CANN 8.2, docs/context/torch_npu-npu_moe_gating_top_k.md: it takes what DeepSeek-V3 has alone
_DEEPSEEK_V3_ONLY = CANN < (8, 3)
_MOST_EXPERTS = 2048
_GROUP_ALIGNMENT = 32  # of the experts of a group, which all together are to fit into _MOST_EXPERTS places


class _Options(NamedTuple):
    """Holds the arguments of :func:`gating_top_k` that are no tensors, by the same names."""

    k: int
    scores: str
    groups: int
    top_groups: int
    group_scores: str
    renormalise: bool
    scale: float
    epsilon: float


def gating_top_k(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    scores: Literal["sigmoid", "softmax"] = "sigmoid",
    groups: int = 1,
    top_groups: int = 1,
    group_scores: Literal["two best", "best"] = "two best",
    renormalise: bool = True,
    scale: float = 1.0,
    epsilon: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Choose the k experts with the largest score plus bias among those of the best groups. Differentiable in logits.

    That is DeepseekV3TopkRouter.forward of transformers, models/deepseek_v3/modeling_deepseek_v3.py, after its product.
    In float32 on the NPU it is one launch, and one for int64 indices, within the limits of ``npu_moe_gating_top_k``; it
    is computed in torch beyond them, and in narrower dtypes, in which torch compares rounded scores. Experts come from
    the largest score on; of equal ones the operator takes the lower index, and torch.topk leaves open which it takes.

    Args:
        logits: ``[T, E]``, of a floating dtype.
        k: from 1 to E. Where it is more than the experts in ``top_groups`` groups, others fill up in no order.
        bias: ``[E]``, added to the scores for the choice alone.
        scores: of the logits.
        groups: into how many groups of equal size the experts are divided.
        top_groups: how many of them experts are chosen from.
        group_scores: a group is as good as the sum of its two best experts, or as its best one, with the bias.
        renormalise: divide the weights by their sum plus ``epsilon``.
        scale: what the weights are multiplied with at the end.
        epsilon: keeps the sum from zero.

    Returns:
        The weights, ``[T, k]`` in the dtype of ``logits``, and the experts, int64 ``[T, k]``.

    Raises:
        ValueError: ``logits`` is not two-dimensional, ``k``, the groups or ``bias`` do not fit its last dimension, or
            scores are none of those.
        TypeError: ``logits`` or ``bias`` is not floating point.
    """
    options = _Options(k, scores, groups, top_groups, group_scores, renormalise, scale, epsilon)
    _check(logits, bias, options)
    bias = None if bias is None else bias.detach()  # no weight depends on it
    trains = torch.is_grad_enabled() and logits.requires_grad
    is_undivided = scores == "sigmoid" and not renormalise  # the operator always divides sigmoids by their sum
    writes_scores = _gradient_needs_scores(options) if trains else is_undivided
    if is_distributed(logits, bias) or is_transformed() or not _is_fused(logits, bias, options, writes_scores):
        return _in_torch(logits, bias, options)
    if trains:
        return _GatingTopK.apply(logits, bias, options)
    weights, experts, all_scores = _launch_gating(logits, bias, options, scale, writes_scores)
    if all_scores is not None:
        weights = all_scores.gather(-1, experts)
        weights = weights if scale == 1.0 else weights * scale
    elif scores == "softmax" and renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
        weights = weights if scale == 1.0 else weights * scale
    return weights, experts


def _check(logits: Tensor, bias: Tensor | None, options: _Options) -> None:
    """Raise what :func:`gating_top_k` says of its arguments."""
    experts, groups = logits.shape[-1] if logits.dim() == 2 else 0, options.groups
    fits = 1 <= options.k <= experts and 1 <= options.top_groups <= groups and experts % groups == 0
    if not fits:
        raise ValueError(
            f"gating_top_k: logits must be [T, E], k from 1 to E, top_groups from 1 to groups, and E a multiple of "
            f"groups; got {list(logits.shape)}, k = {options.k}, top_groups = {options.top_groups}, groups = {groups}"
        )
    if not logits.is_floating_point():
        raise TypeError(f"gating_top_k: logits must be floating point, got {logits.dtype}")
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"gating_top_k: bias must be floating point, got {bias.dtype}")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"gating_top_k: bias must be [{experts}], got {list(bias.shape)}")
    if bias is not None and bias.device != logits.device:
        raise ValueError(f"gating_top_k: bias must be on {logits.device}, got {bias.device}")
    for name, given, known in (
        ("scores", options.scores, ("sigmoid", "softmax")),
        ("group_scores", options.group_scores, ("two best", "best")),
    ):
        if given not in known:
            raise ValueError(f"gating_top_k: {name} must be one of {', '.join(known)}, got {given!r}")


def _is_fused(logits: Tensor, bias: Tensor | None, options: _Options, writes_scores: bool) -> bool:
    """Tell whether the operator takes them: op-plugin, docs/zh/custom_APIs/torch_npu, Atlas A2 and A3.

    The gradient of a softmax that is divided by its sum is simple where the sum is not tiny, as a bias may make it.
    """
    if logits.device.type != "npu" or logits.dtype is not torch.float32 or not logits.numel():
        return False
    experts, groups = logits.shape[1], options.groups
    size = experts // groups
    aligned = -(-size // _GROUP_ALIGNMENT) * _GROUP_ALIGNMENT * groups
    in_groups = groups == 1 or (size > 2 and aligned <= _MOST_EXPERTS and options.k <= options.top_groups * size)
    simple = bias is None or (
        bias.shape == logits.shape[1:] and not (options.scores == "softmax" and options.renormalise)
    )
    if _DEEPSEEK_V3_ONLY and not _is_deepseek_v3(logits, bias, options, writes_scores):
        return False
    return experts <= _MOST_EXPERTS and in_groups and simple


def _is_deepseek_v3(logits: Tensor, bias: Tensor | None, options: _Options, writes_scores: bool) -> bool:
    """Tell whether the operator of CANN 8.2 takes them, which computes the gating of DeepSeek-V3 in inference."""
    return (
        logits.shape[1] == 256
        and options.k <= 32
        and bias is not None
        and (options.groups, options.top_groups) == (8, 4)
        and (options.group_scores == "two best" or options.scores == "softmax")
        and not writes_scores
    )


def _gradient_needs_scores(options: _Options) -> bool:
    """Tell whether the gradient needs the scores beside the weights: of a softmax divided by its sum it does not."""
    return options.scores == "sigmoid" or not options.renormalise


def _launch_gating(
    logits: Tensor, bias: Tensor | None, options: _Options, scale: float, writes_scores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operator's weights, of a sigmoid divided by their sum, the experts, and all scores if asked for."""
    is_sigmoid = options.scores == "sigmoid"
    divides = is_sigmoid or not options.renormalise
    weights, experts, all_scores = torch.ops.npu.npu_moe_gating_top_k(
        logits,
        options.k,
        bias=None if bias is None else bias.to(logits.dtype),
        k_group=options.top_groups,
        group_count=options.groups,
        group_select_mode=int(options.group_scores == "two best"),
        norm_type=int(is_sigmoid),
        out_flag=writes_scores,
        routed_scaling_factor=scale if divides else 1.0,
        eps=options.epsilon,
    )
    return weights, experts.long(), all_scores if writes_scores else None


def _in_torch(logits: Tensor, bias: Tensor | None, options: _Options) -> tuple[Tensor, Tensor]:
    """Compute weights and experts in torch, in the dtype of the logits."""
    scores = _scores(logits, options)
    choice = scores if bias is None else scores + bias
    if options.groups > 1:
        by_group = choice.unflatten(-1, (options.groups, -1))
        best = by_group.amax(-1) if options.group_scores == "best" else by_group.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(-1, best.topk(options.top_groups, -1).indices, 1.0).unsqueeze(-1)
        choice = by_group.masked_fill(kept == 0, float("-inf")).flatten(-2)
    experts = choice.topk(options.k, -1).indices
    return _weights(logits, experts, options), experts


def _weights(logits: Tensor, experts: Tensor, options: _Options) -> Tensor:
    """Compute the weights of given experts in torch, differentiable, in the dtype of the logits.

    Under autocast sums are float32, and DeepSeek-V3's router divides in place.
    """
    weights = _scores(logits, options).gather(-1, experts)
    if options.renormalise:
        weights = (weights / (weights.sum(-1, keepdim=True) + options.epsilon)).to(weights.dtype)
    return weights * options.scale


def _scores(logits: Tensor, options: _Options) -> Tensor:
    return logits.sigmoid() if options.scores == "sigmoid" else logits.softmax(-1)


class _GatingTopK(torch.autograd.Function):
    """Computes what the operator takes, and keeps for the gradient what it needs.

    With ``w = s / (sum(s) + epsilon)`` of the chosen scores s, and the gradient g of w, that of s is
    ``(g - sum(g · w)) / (sum(s) + epsilon)``. A sigmoid has the slope ``s · (1 - s)``, which leaves
    ``w · (g - sum(g · w)) · (1 - s)``: the gradient of a softmax whose result is w, times ``1 - s``. A softmax divided
    by the sum of its k largest is the softmax of these, and has that gradient itself.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, bias: Tensor | None, options: _Options) -> tuple[Tensor, Tensor]:
        is_sigmoid = options.scores == "sigmoid"
        weights, experts, scores = _launch_gating(logits, bias, options, 1.0, _gradient_needs_scores(options))
        if is_sigmoid:
            scores = scores.gather(-1, experts)
            weights = weights if options.renormalise else scores
        elif options.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + options.epsilon)
        ctx.save_for_backward(logits, experts, weights if options.renormalise else None, scores)
        ctx.options = options
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)  # no zeros for the experts
        return weights if options.scale == 1.0 else weights * options.scale, experts

    @staticmethod
    def backward(ctx, grad: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        logits, experts, weights, scores = ctx.saved_tensors
        options: _Options = ctx.options
        if by_formula(grad):
            function = partial(_weights, experts=experts, options=options)
            return gradients(function, (logits,), (True,), grad)[0], None, None
        grad = grad if options.scale == 1.0 else grad * options.scale
        if weights is not None:
            grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
            grad = grad if scores is None else grad * (1 - scores)
        elif options.scores == "sigmoid":
            grad = torch.ops.aten.sigmoid_backward(grad, scores)
        grad = torch.zeros_like(logits).scatter_(-1, experts, grad)
        if weights is None and options.scores == "softmax":
            grad = torch.ops.aten._softmax_backward_data(grad, scores, -1, scores.dtype)
        return grad, None, None
