"""One word of each row of logits, written where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = torch.float32, torch.float16, torch.bfloat16
_MOST = 2**31 - 1  # elements whose places are 32-bit numbers


def write(x: Tensor, words: Tensor, values: Tensor) -> None:
    """Set one word of each row ``[N, W]`` to its value; words and values are ``[N, 1]``.

    ``scatter_`` along the last dimension reads and writes whole rows for that: CANN's ops-nn,
    index/scatter_elements_v2/op_kernel/scatter_elements_v2.h.
    """
    if _is_written_in_place(x):
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
        torch.ops.npu.npu_scatter_nd_update_(x, torch.cat((rows, words), 1), values.squeeze(-1))
    else:
        x.scatter_(1, words, values)


def _is_written_in_place(x: Tensor) -> bool:
    """Tell whether ``npu_scatter_nd_update_`` writes to a tensor; a graph of torch.compile has its own ways.

    What is not contiguous is copied before and behind it: CANN's ops-nn, index/scatter_nd_update,
    aclnn_scatter_nd_update.cpp, with its dtypes. Places beyond 32 bits are written since CANN 9.0 alone: op_host/arch32/
    scatter_nd_update_tiling.cpp there.
    """
    return (
        x.device.type == "npu"
        and x.dtype in _DTYPES
        and 0 < x.numel() <= _MOST
        and x.is_contiguous()
        and not torch.compiler.is_compiling()
    )
