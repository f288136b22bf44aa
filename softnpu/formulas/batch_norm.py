"""Define what torch_npu's SyncBatchNorm sums on each device and joins.

op-plugin, op_plugin/ops/opapi/BatchNormReduceKernelNpuOpApi.cpp and BatchNormGatherStatsUpdateKernelNpuOpApi.cpp.
"""

from __future__ import annotations

from torch import Tensor

from softnpu.argument_checks import require
from softnpu.aten_batch_norm import joined
from softnpu.formulas import formula


@formula
def batch_norm_reduce(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums of x and of x² of every channel, in float32."""
    _require_channels("batch_norm_reduce", input)
    x = input.float()
    others = [dim for dim in range(x.dim()) if dim != 1]
    return x.sum(others), x.square().sum(others)


@formula
def batch_norm_gather_stats_update(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join the sums [devices, C] of x, named mean, and of x², named invstd, and move the running statistics."""
    _require_channels("batch_norm_gather_stats_update", input)
    total, squares, count = mean.float().sum(0), invstd.float().sum(0), counts.float().sum()
    return joined(total, squares, count, running_mean, running_var, momentum, eps, mean.dtype)


def _require_channels(operator: str, input: Tensor) -> None:
    require(input.dim() > 1, operator, "The dim input tensor [self] must more than 1.")
