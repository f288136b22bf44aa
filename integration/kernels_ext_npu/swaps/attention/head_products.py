"""Products of heads with the keys' and the values' part of one weight, in which both lie head by head.

A batched product copies a part of each head before it reads it: CANN's ops-nn, matmul/common/op_host/op_api,
`IsTransposeNonContiguous` and `IsTransposeLastTwoDims` of matmul_util.cpp. Where both parts are as large, the weight is
twice as many matrices as they lie, and a product by groups skips those without rows: ops-transformer,
gmm/grouped_matmul/op_kernel/grouped_matmul.h 8.5.0:263.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ONE_RESULT, _ENDS, _BY_ROWS = 3, 0, 0
_MOST_GROUPS = 1024


class HeadProducts:
    """Products with a weight ``[N, D + D_v, R]`` for the queries ``[B, N, S_q, ...]`` of one attention."""

    def __init__(self, weight: Tensor, split: int, query: Tensor) -> None:
        """``split`` is D."""
        self.weight, self.split = weight, split
        self.ends: Tensor | None = None  # where the rows of each head end, of its keys' part and of its values' part
        rows = query.shape[0] * query.shape[2]
        has_equal_parts = weight.is_contiguous() and weight.shape[1] == 2 * split and 2 * len(weight) <= _MOST_GROUPS
        if rows and has_equal_parts and not _may_be_derived():
            # 0, 0, M, M, 2·M, 2·M, …: from the third on keys have rows, from the second on values
            each = torch.arange(0, (len(weight) + 1) * rows, rows, device=query.device)
            self.ends = each.repeat_interleave(2)

    def absorb(self, query: Tensor) -> Tensor:
        """Multiply ``[N, M, D]`` with the part of the keys: ``[N, M, R]``."""
        if self.ends is None:
            return torch.bmm(query, self.weight[:, : self.split])
        return self._multiply(query, self._parts(), self.ends[2:])

    def expand_values(self, sums: Tensor) -> Tensor:
        """Multiply ``[N, M, R]`` with the part of the values: ``[N, M, D_v]``."""
        if self.ends is None:
            return torch.bmm(sums, self.weight[:, self.split :].mT)
        return self._multiply(sums, self._parts().mT, self.ends[1:-1])

    def _parts(self) -> Tensor:
        """Return ``[2·N, D, R]``, the parts of all heads in their order."""
        return self.weight.unflatten(1, (2, self.split)).flatten(0, 1)

    def _multiply(self, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        (result,) = torch.ops.npu.npu_grouped_matmul(
            [rows.flatten(0, 1)],
            [matrices],
            group_list=ends,
            split_item=_ONE_RESULT,
            group_type=_BY_ROWS,
            group_list_type=_ENDS,
        )
        return result.view(*rows.shape[:2], -1)


def _may_be_derived() -> bool:
    """Tell whether somebody may derive the products: those by groups have no derivative."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
