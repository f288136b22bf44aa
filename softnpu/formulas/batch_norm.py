"""Define what torch_npu's SyncBatchNorm sums on each device and joins.

op-plugin, op_plugin/ops/opapi/BatchNormReduceKernelNpuOpApi.cpp and BatchNormGatherStatsUpdateKernelNpuOpApi.cpp.
"""

from __future__ import annotations

from torch import Tensor

from softnpu.aten_batch_norm import joined
from softnpu.formulas import formula


@formula
def batch_norm_reduce(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums of x and of x² of every channel, in float32."""
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
    total, squares, count = mean.float().sum(0), invstd.float().sum(0), counts.float().sum()
    return joined(total, squares, count, running_mean, running_var, momentum, eps)
