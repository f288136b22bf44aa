"""One logit of each row, such as that of its label, written in place."""

from __future__ import annotations

import torch
from torch import Tensor

_SCATTER_DTYPES = torch.float32, torch.float16, torch.bfloat16
_MAX_ELEMENTS = 2**31 - 1  # whose positions have 32 bits


def row_and_word(words: Tensor) -> Tensor:
    """Return the row and the word, ``[N, 2]``, for the word ``[N, 1]`` of each row."""
    return torch.cat((torch.arange(words.shape[0], device=words.device).unsqueeze(-1), words), 1)


def write_one_per_row(x: Tensor, positions: Tensor, values: Tensor) -> None:
    """Set one element of each row ``[N, W]``, at its row and word ``[N, 2]``, to its value ``[N, 1]``.

    ``scatter_`` along the last dimension reads and writes whole rows for that: CANN's ops-nn,
    index/scatter_elements_v2/op_kernel/scatter_elements_v2.h.
    """
    if _is_scatter_fused(x):
        torch.ops.npu.npu_scatter_nd_update_(x, positions, values.squeeze(-1))
    else:
        x.scatter_(1, positions[:, 1:], values)


def _is_scatter_fused(x: Tensor) -> bool:
    """Tell whether ``npu_scatter_nd_update_`` writes to a tensor; a graph of torch.compile has its own ways.

    What is not contiguous is copied before and behind it: CANN's ops-nn, index/scatter_nd_update, aclnn_scatter_nd_
    update.cpp, which lists its dtypes. Positions beyond 32 bits have a kernel of their own since CANN 9.0; of 8.5
    nobody says: op_host/arch32/scatter_nd_update_tiling.cpp.
    """
    return (
        x.device.type == "npu"
        and x.dtype in _SCATTER_DTYPES
        and 0 < x.numel() <= _MAX_ELEMENTS
        and x.is_contiguous()
        and not torch.compiler.is_compiling()
    )
