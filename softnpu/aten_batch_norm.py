"""Define the parts of a batch norm over several devices, which the CPU has not.

Dimension 1 is that of the channels. Mean and inverse deviation are float32, and so is what is computed inside; where
torch has the operators, on CUDA, they are in aten/src/ATen/native/cuda/Normalization.cuh. op-plugin:
op_plugin/ops/aclops/BatchNorm*KernelNpu.cpp and op_plugin/ops/opapi/BatchNorm*KernelNpuOpApi.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softnpu.aten_missing_on_cpu import formula


@formula("batch_norm_stats")
def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean of every channel, and ``1 / sqrt(var + eps)``."""
    var, mean = torch.var_mean(input.float(), _others(input), correction=0)
    return mean, torch.rsqrt(var + eps)


@formula("batch_norm_elemt", "batch_norm_elemt.out")
def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``(x - mean) · invstd · weight + bias``, rounded once."""
    x = (input.float() - channels(mean, input)) * channels(invstd, input)
    x = x if weight is None else x * channels(weight, input)
    x = (x if bias is None else x + channels(bias, input)).to(input.dtype)
    return x if out is None else out.resize_(x.shape).copy_(x)


@formula("batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """Return the sums of dy and of ``dy · (x - mean)``, and the gradients of weight and bias; those that are wanted."""
    dy = grad_out.float()
    sum_dy = dy.sum(_others(input))
    sum_dy_xmu = (dy * (input.float() - channels(mean, input))).sum(_others(input))
    dtype = mean.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(dtype) if weight_g else None,
        sum_dy.to(dtype) if bias_g else None,
    )


@formula("batch_norm_backward_elemt")
def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Compute the gradient of x from the sums over all devices."""
    share = 1 / count.float().sum()
    x = (input.float() - channels(mean, input)) * channels(invstd.square() * sum_dy_xmu * share, input)
    scale = invstd if weight is None else invstd * weight
    dx = (grad_out.float() - channels(sum_dy * share, input) - x) * channels(scale, input)
    return dx.to(input.dtype)


@formula("batch_norm_gather_stats_with_counts")
def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join the statistics [devices, C] of all devices, and move the running ones."""
    n = counts.float().view(-1, 1)
    squares = (invstd.float().pow(-2) - eps + mean.float().square()) * n
    total = (mean.float() * n).sum(0)
    return joined(total, squares.sum(0), n.sum(), running_mean, running_var, momentum, eps, mean.dtype)


def joined(
    total: Tensor,
    squares: Tensor,
    count: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return mean and inverse deviation from the sums of x and x² and their number, and move the running ones."""
    mean = total / count
    var = (squares / count - mean.square()).clamp(min=0)
    for running, value in ((running_mean, mean), (running_var, var * count / (count - 1))):
        if running is not None:
            running.copy_(running * (1 - momentum) + value * momentum)
    return mean.to(dtype), torch.rsqrt(var + eps).to(dtype)


def channels(values: Tensor, like: Tensor) -> Tensor:
    """View one value a channel so that it multiplies ``like``."""
    return values.float().view(1, -1, *[1] * (like.dim() - 2))


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
