"""Define npu_cross_entropy_loss, log_softmax and nll_loss in one, its gradient, and the product of a head with sums.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_cross_entropy_loss.md. Sums and
rounding: CANN's ops-nn, loss/cross_entropy_loss and loss/cross_entropy_loss_grad, op_kernel and docs. All is computed
in float32, and rounded once to the dtype of the input: the loss and log_prob, from which the gradient is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, float32, int32, int64
from torch.nn import functional as F

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.formulas import formula
from softnpu.host_call import needs_gradient

MOST_ROWS = 200000
NO_INDEX = -100
LONGEST = 65534  # elements of a hidden state


@formula
def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = NO_INDEX,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, [1] or [N] for reduction "none", and log_prob [N, C]; the other two results are empty.

    A target may be ignore_index, which the kernels take to be one that is left out, or else one of the C classes.
    """
    operator = "npu_cross_entropy_loss"
    _require(operator, input, target, weight, reduction, ignore_index, label_smoothing)
    rule = "zloss is not supported: lse_square_scale_for_zloss must be 0 and return_zloss False"
    require(lse_square_scale_for_zloss == 0 and not return_zloss, operator, rule)
    if needs_gradient(input) and torch.is_grad_enabled():
        require(label_smoothing == 0, operator, "with a gradient label_smoothing must be 0")
        plain = weight is None and ignore_index == NO_INDEX
        rule = "with a gradient reduction 'mean' takes no weight and no ignore_index"
        require(reduction != "mean" or plain, operator, rule)
    log_prob = torch.log_softmax(input.float(), -1)
    kept = target != ignore_index
    index = target.clamp(min=0).unsqueeze(-1)
    weights = kept.float() if weight is None else weight[index.squeeze(-1)] * kept
    losses = -log_prob.gather(-1, index).squeeze(-1) * weights
    smooth = -(log_prob if weight is None else log_prob * weight).sum(-1) * kept
    share = label_smoothing / input.shape[1]
    loss = losses if reduction == "none" else losses.sum().view(1)
    if label_smoothing:
        smooth = smooth if reduction == "none" else smooth.sum().view(1)
        loss = loss * (1 - label_smoothing) + smooth * share
    if reduction == "mean":
        loss = loss / weights.sum()
    empty = input.new_empty(0)
    return loss.to(input.dtype), log_prob.to(input.dtype), empty, empty.clone()


@formula
def npu_cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    grad_zloss: Tensor | None = None,
    lse_for_zloss: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = NO_INDEX,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> Tensor:
    """Compute ``(exp(log_prob) - one_hot(target)) · grad · weight`` for every row that is not left out."""
    operator = "npu_cross_entropy_loss_backward"
    _require(operator, log_prob, target, weight, reduction, ignore_index, label_smoothing)
    require_dtypes(operator, {(d, d) for d in FLOATING}, grad_loss=grad_loss, log_prob=log_prob)
    n, c = log_prob.shape
    expected = [n] if reduction == "none" else [1]
    require(list(grad_loss.shape) == expected, operator, f"grad_loss must be {expected}, got {describe(grad_loss)}")
    kept = (target != ignore_index).float()
    index = target.clamp(min=0)
    weights = kept if weight is None else weight[index] * kept
    grad = grad_loss.float().expand(n) / (weights.sum() if reduction == "mean" else 1)
    softmax = log_prob.float().exp()
    loss_grad = (grad * (1 - label_smoothing) * weights).unsqueeze(-1)
    dx = softmax * loss_grad - F.one_hot(index, c) * loss_grad
    if label_smoothing:
        smooth_grad = (grad * label_smoothing / c * kept).unsqueeze(-1) * (1 if weight is None else weight)
        dx = dx + softmax * smooth_grad.expand(n, c).sum(-1, keepdim=True) - smooth_grad
    return dx.to(grad_loss.dtype)


@formula
def npu_fused_linear_online_max_sum(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return of logits ``[N, V]`` the largest, ``Σ exp(x - largest)`` and ``x - largest`` at the target, ``[N]`` each.

    Behind these: the targets that are no words, a bit each with the first one lowest, the other ones counted from
    vocab_start_index, and the logits. Sums are of logits rounded to the dtype of the input. CANN's ops-nn,
    matmul/fused_linear_online_max_sum/op_kernel/fused_linear_online_max_sum.h and op_host; the kernel takes a target of
    vocab_end_index for none of the words, where the page of op-plugin takes it for the last one.
    """
    operator = "npu_fused_linear_online_max_sum"
    dtypes: set[tuple[torch.dtype, ...]] = {(d, d, i) for d in (float16, bfloat16) for i in (int32, int64)}
    require_dtypes(operator, dtypes, input=input, weight=weight, target=target)
    fits = input.dim() == weight.dim() == 2 and input.shape[1] == weight.shape[1] <= LONGEST and weight.shape[0] > 0
    rule = f"input must be [N, H] with H <= {LONGEST}, weight [V, H]"
    require(fits, operator, f"{rule}, got {describe(input)}, {describe(weight)}")
    require(target.shape == input.shape[:1], operator, f"target must be [{input.shape[0]}], got {describe(target)}")
    rule = "vocab_start_index must not be negative, and vocab_end_index not be below it"
    require(0 <= vocab_start_index <= vocab_end_index, operator, f"{rule}, got {vocab_start_index}, {vocab_end_index}")
    logits = (input.float() @ weight.float().t()).to(input.dtype)
    x = logits.float()
    largest = x.amax(-1)
    below = x - largest.unsqueeze(-1)
    is_masked = (target < vocab_start_index) | (target >= vocab_end_index)
    masked_target = (target - vocab_start_index).masked_fill(is_masked, 0)
    inside = masked_target.long().clamp(max=weight.shape[0] - 1).unsqueeze(-1)
    predicted = below.gather(1, inside).squeeze(-1).masked_fill(is_masked, 0)
    padded = F.pad(is_masked.int(), (0, -is_masked.shape[0] % 8), value=1).view(-1, 8)
    bits = (padded << torch.arange(8)).sum(-1).to(torch.uint8)
    return largest, below.exp().sum(-1), predicted, bits, masked_target, logits if return_logits else None


def _require(
    operator: str, x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignored: int, smoothing: float
) -> None:
    require_dtypes(operator, {(d, int64) for d in FLOATING}, input=x, target=target)
    fits = x.dim() == 2 and x.shape[1] > 0 and 0 < x.shape[0] <= MOST_ROWS
    require(fits, operator, f"input must be [N, C] with 0 < N <= {MOST_ROWS}, got {describe(x)}")
    require(target.shape == x.shape[:1], operator, f"target must be [{x.shape[0]}], got {describe(target)}")
    require(reduction in ("mean", "sum", "none"), operator, f"reduction must be mean, sum or none, got {reduction!r}")
    require(ignored < x.shape[1], operator, f"ignore_index must be below the {x.shape[1]} classes, got {ignored}")
    require(0 <= smoothing < 1, operator, f"label_smoothing must be in [0, 1), got {smoothing}")
    if weight is not None:
        fits = weight.dtype == float32 and weight.shape == x.shape[1:]
        require(fits, operator, f"weight must be float32 [{x.shape[1]}], got {describe(weight)}")
    inside = (target == ignored) | ((target >= 0) & (target < x.shape[1]))
    rule = f"target must be below {x.shape[1]} and not negative, unless it is ignore_index ({ignored})"
    require_values(bool(inside.all()), operator, f"{rule}; the device reads beyond its memory")
