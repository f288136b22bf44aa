"""The logits of a head with the statistics of their rows: in one launch where the device has one for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.cann import CANN
from .objective import LogitStatistics, Objective

_MAX_HIDDEN_SIZE = 65534  # of a hidden state: CANN, aclnnFusedLinearOnlineMaxSum


def logits_and_statistics(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective
) -> tuple[Tensor, LogitStatistics]:
    """Return what the head gives, ``[N, W]``, in its dtype, and `Objective.statistics` of it.

    Args:
        hidden_states: ``[N, H]``.
        weight: ``[W, H]``.
        bias: ``[W]``, or None.
        labels: ``[N, 1]``, in ``[0, W)``.
        objective: the loss.
    """
    if objective.is_identity and not objective.label_smoothing and _is_fused(hidden_states, weight, bias):
        largest, total, x = _online_max_sum(hidden_states, weight, labels.squeeze(1))
        return x, (largest + total.log(), objective.label_logits(x, labels), None)
    x = F.linear(hidden_states, weight, bias)
    return x, objective.statistics(x, labels)


def _is_fused(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether ``npu_fused_linear_online_max_sum`` computes the logits; a graph of torch.compile has its own ways.

    Its limits (Atlas A2 and A3): op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_linear_online_max_sum.md.
    CANN has its kernel since 8.5, and the wheels of torch_npu for 9.1 call it. It copies what is not contiguous. Where
    256 logits side by side are -inf, as float16 has them below -65504, its sums are NaN.
    """
    return (
        CANN >= (9, 1)
        and bias is None
        and hidden_states.device.type == "npu"
        and hidden_states.dtype == weight.dtype == torch.bfloat16
        and 0 < hidden_states.shape[1] <= _MAX_HIDDEN_SIZE
        and hidden_states.shape[0] > 0
        and weight.shape[0] > 0
        and weight.is_contiguous()
        and not torch.compiler.is_compiling()
        and hasattr(torch.ops.npu, "npu_fused_linear_online_max_sum")
    )


# torch_npu has no meta kernel of it: what asks for shapes on fake tensors finds them here.
@torch.library.custom_op(f"{__name__.partition('.')[0]}::npu_fused_linear_online_max_sum", mutates_args=())
def _online_max_sum(input: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit of each row and the sum of ``exp(x - largest)``, float32 ``[N]``, and logits ``[N, W]``.

    Sums are of logits that are rounded to their dtype, as a head's are: CANN's ops-nn,
    matmul/fused_linear_online_max_sum/op_kernel/fused_linear_online_max_sum.h.
    """
    found = torch.ops.npu.npu_fused_linear_online_max_sum(input, weight, target, 0, weight.shape[0], True)
    return found[0], found[1], found[5]


@_online_max_sum.register_fake
def _(input: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = input.shape[0]
    largest, total = (input.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return largest, total, input.new_empty(rows, weight.shape[0])
