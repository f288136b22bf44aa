"""Define norms with a mean: the layer norm of a sum, DeepNorm, and the group norm with SiLU.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu, op_plugin/ops/opapi/AddLayerNormKernelNpuOpApi.cpp,
and CANN's ops-nn, norm/{add_layer_norm,deep_norm,group_norm_silu}{,_grad}/docs. Sums and statistics are float32, the
result is rounded once; that of group_norm_silu is inferred.
"""

from __future__ import annotations

import torch
from torch import Tensor, float32

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.formulas import formula

_WITH_PARAMETERS: set[tuple[torch.dtype, ...]] = {(d, d, p, p) for d in FLOATING for p in (d, float32)}
_MIXED: set[tuple[torch.dtype, ...]] = {
    (*pair, float32, float32) for d in (torch.float16, torch.bfloat16) for pair in ((d, float32), (float32, d))
}


@formula
def npu_add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-05, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the layer norm of ``x1 + x2``, mean and rstd in float32 with a last dimension of one, and the sum.

    The norm is that of the exact sum. Of x1 and x2 in two dtypes, both results are float32. Without additional_output
    the sum is not written, here NaN.
    """
    operator = "npu_add_layer_norm"
    require_dtypes(operator, _WITH_PARAMETERS | _MIXED, x1=x1, x2=x2, gamma=gamma, beta=beta)
    _require_rows(operator, x1, x2, gamma)
    require(beta.shape == gamma.shape, operator, f"gamma {describe(gamma)} and beta {describe(beta)} differ in shape")
    x = x1.float() + x2.float()
    mean, rstd = _statistics(x, epsilon)
    dtype = x1.dtype if x1.dtype == x2.dtype else float32
    y = ((x - mean) * rstd * gamma.float() + beta.float()).to(dtype).contiguous()
    total = x.to(dtype).contiguous() if additional_output else torch.full(x.shape, torch.nan, dtype=dtype)
    return y, mean, rstd, total


@formula
def npu_add_layer_norm_backward(
    dy_opt: Tensor | None,
    x1: Tensor,
    x2: Tensor,
    rstd: Tensor,
    mean: Tensor,
    gamma: Tensor,
    dsum_opt: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of x1, the same of x2, and those of gamma and beta in float32."""
    operator = "npu_add_layer_norm_backward"
    require_dtypes(operator, {d[:3] for d in _WITH_PARAMETERS}, x1=x1, x2=x2, gamma=gamma)
    _require_rows(operator, x1, x2, gamma)
    for name, grad in (("dy", dy_opt), ("dsum", dsum_opt)):
        fits = grad is None or (grad.shape == x1.shape and grad.dtype == x1.dtype)
        require(fits, operator, f"{name} must be {describe(x1)}, got {grad if grad is None else describe(grad)}")
    dy = torch.zeros_like(x1) if dy_opt is None else dy_opt
    dx, dgamma, dbeta = _gradients(dy.float(), x1.float() + x2.float(), mean, rstd, gamma.float())
    if dsum_opt is not None:
        dx = dx + dsum_opt.float()
    dx = dx.to(x1.dtype).contiguous()
    return dx, dx.clone(), dgamma, dbeta


@formula
def npu_deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float = 0.3, epsilon: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, rstd and the layer norm of ``alpha · x + gx``."""
    operator = "npu_deep_norm"
    require_dtypes(operator, {(d,) * 4 for d in FLOATING}, x=x, gx=gx, beta=beta, gamma=gamma)
    _require_rows(operator, x, gx, gamma, several=True)
    require(beta.shape == gamma.shape, operator, f"gamma {describe(gamma)} and beta {describe(beta)} differ in shape")
    total = alpha * x.float() + gx.float()
    mean, rstd = _statistics(total, epsilon, gamma.dim())
    return mean, rstd, ((total - mean) * rstd * gamma.float() + beta.float()).to(x.dtype).contiguous()


@formula
def npu_deep_norm_backward(
    dy: Tensor, x: Tensor, gx: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, alpha: float = 0.3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x and gx, and those of beta and gamma in float32."""
    operator = "npu_deep_norm_backward"
    require_dtypes(operator, {(d,) * 4 for d in FLOATING}, dy=dy, x=x, gx=gx, gamma=gamma)
    _require_rows(operator, x, gx, gamma, several=True)
    require(dy.shape == x.shape, operator, f"dy {describe(dy)} and x {describe(x)} differ in shape")
    total = alpha * x.float() + gx.float()
    dgx, dgamma, dbeta = _gradients(dy.float(), total, mean, rstd, gamma.float(), gamma.dim())
    return (alpha * dgx).to(x.dtype).contiguous(), dgx.to(x.dtype).contiguous(), dbeta, dgamma


@formula
def npu_group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-05
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``silu`` of the group norm of [N, C, ...], and mean and rstd [N, group] in the dtype of the weight."""
    operator = "npu_group_norm_silu"
    require((weight is None) == (bias is None), operator, "weight and bias are given together or not at all")
    require_dtypes(operator, {(d,) for d in FLOATING}, input=input)
    require(2 <= input.dim() <= 8, operator, f"input must have 2 to 8 dimensions, got {describe(input)}")
    require(input.numel() > 0, operator, f"input is empty: {describe(input)}")
    channels = input.shape[1]
    rule = f"group must be positive and divide the {channels} channels, got {group}"
    require(group > 0 and channels % group == 0, operator, rule)
    require(eps > 0, operator, f"eps must be positive, got {eps}")
    statistics_dtype = input.dtype
    if weight is not None and bias is not None:
        require_dtypes(operator, {d[1:] for d in _WITH_PARAMETERS}, input=input, weight=weight, bias=bias)
        fits = weight.shape == bias.shape == (channels,)
        require(fits, operator, f"weight and bias must be [{channels}], got {describe(weight)}, {describe(bias)}")
        statistics_dtype = weight.dtype
    y, mean, rstd = _group_norm(input, group, weight, bias, eps)
    y = y * torch.sigmoid(y)
    return y.to(input.dtype), mean.to(statistics_dtype), rstd.to(statistics_dtype)


@formula
def npu_group_norm_swish(
    input: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float | None = 1e-05,
    swish_scale: float | None = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y · sigmoid(swish_scale · y)`` for y the group norm of [N, C, ...], and mean and rstd [N, num_groups].

    op-plugin, torch_npu-npu_group_norm_swish.md; all results have the dtype of the input.
    """
    operator = "npu_group_norm_swish"
    _require_groups(operator, input, num_groups, weight, bias)
    y, mean, rstd = _group_norm(input, num_groups, weight, bias, 1e-05 if eps is None else eps)
    y = y * torch.sigmoid((1.0 if swish_scale is None else swish_scale) * y)
    return tuple(t.to(input.dtype) for t in (y, mean, rstd))  # type: ignore[return-value]


@formula
def npu_group_norm_swish_grad(
    grad: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_input_mask: list[bool],
    swish_scale: float | None = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias; all three, as the device does, whatever the mask says."""
    operator = "npu_group_norm_swish_grad"
    _require_groups(operator, input, num_groups, weight, bias)
    require(grad.shape == input.shape and grad.dtype == input.dtype, operator, f"grad is {describe(grad)}")
    n, c, *rest = input.shape
    shape, scale = [1, c] + [1] * len(rest), 1.0 if swish_scale is None else swish_scale
    x = input.float().reshape(n, num_groups, -1)
    normed = ((x - mean.float().unsqueeze(-1)) * rstd.float().unsqueeze(-1)).view(input.shape)
    y = normed * weight.float().view(shape) + bias.float().view(shape)
    gate = torch.sigmoid(scale * y)
    dy = grad.float() * gate * (1 + scale * y * (1 - gate))
    over = [dim for dim in range(input.dim()) if dim != 1]
    weighted = (dy * weight.float().view(shape)).reshape(n, num_groups, -1)
    flat = normed.reshape(n, num_groups, -1)
    inner = weighted.mean(-1, keepdim=True) + flat * (weighted * flat).mean(-1, keepdim=True)
    dx = (rstd.float().unsqueeze(-1) * (weighted - inner)).view(input.shape)
    return tuple(t.to(input.dtype) for t in (dx, (dy * normed).sum(over), dy.sum(over)))  # type: ignore[return-value]


@formula
def npu_layer_norm_eval(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """Return the layer norm in float32, rounded once; without statistics, and so without a gradient."""
    require_dtypes("npu_layer_norm_eval", {(d,) for d in FLOATING}, input=input)
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return torch.nn.functional.layer_norm(input.float(), normalized_shape, weight, bias, eps).to(input.dtype)


def _require_groups(operator: str, input: Tensor, groups: int, weight: Tensor, bias: Tensor) -> None:
    require_dtypes(operator, {(d, d, d) for d in FLOATING}, input=input, weight=weight, bias=bias)
    require(2 <= input.dim() <= 8, operator, f"input must have 2 to 8 dimensions, got {describe(input)}")
    channels = input.shape[1]
    rule = f"num_groups must be positive and divide the {channels} channels, got {groups}"
    require(groups > 0 and channels % groups == 0, operator, rule)
    fits = weight.shape == bias.shape == (channels,)
    require(fits, operator, f"weight and bias must be [{channels}], got {describe(weight)}, {describe(bias)}")


def _group_norm(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm in float32, and mean and rstd [N, groups]."""
    x = input.float().reshape(input.shape[0], groups, -1)
    mean, rstd = _statistics(x, eps)
    y = ((x - mean) * rstd).view(input.shape)
    if weight is not None and bias is not None:
        shape = [1, -1] + [1] * (input.dim() - 2)
        y = y * weight.float().view(shape) + bias.float().view(shape)
    return y, mean[..., 0], rstd[..., 0]


def _statistics(x: Tensor, epsilon: float, dims: int = 1) -> tuple[Tensor, Tensor]:
    """Return mean and rstd over the last dimensions, keepdim."""
    over = tuple(range(-dims, 0))
    mean = x.mean(over, keepdim=True)
    return mean, torch.rsqrt((x - mean).square().mean(over, keepdim=True) + epsilon)


def _gradients(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, dims: int = 1) -> tuple[Tensor, ...]:
    """Return dx, dgamma and dbeta in float32."""
    over, rows = tuple(range(-dims, 0)), tuple(range(x.dim() - dims))
    normed, weighted = (x - mean) * rstd, dy * gamma
    inner = weighted.mean(over, keepdim=True) + normed * (weighted * normed).mean(over, keepdim=True)
    return rstd * (weighted - inner), (dy * normed).sum(rows), dy.sum(rows)


def _require_rows(operator: str, x1: Tensor, x2: Tensor, gamma: Tensor, several: bool = False) -> None:
    require(x1.shape == x2.shape, operator, f"{describe(x1)} and {describe(x2)} differ in shape")
    require(2 <= x1.dim() <= 8, operator, f"x must have 2 to 8 dimensions, got {describe(x1)}")
    most = x1.dim() - 1 if several else 1
    fits = 1 <= gamma.dim() <= most and x1.shape[-gamma.dim() :] == gamma.shape
    require(fits, operator, f"gamma must be the last 1 to {most} dimensions of {describe(x1)}, got {describe(gamma)}")
    require(0 not in x1.shape or several, operator, f"x is empty: {describe(x1)}")
