"""One word of each row of logits, written where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

_WRITTEN = torch.float32, torch.float16, torch.bfloat16
_MOST = 2**31 - 1  # elements whose places have 32 bits


def places(words: Tensor) -> Tensor:
    """Return the row and the word for the word ``[N, 1]`` of each row: ``[N, 2]``."""
    return torch.cat((torch.arange(words.shape[0], device=words.device).unsqueeze(-1), words), 1)


def write(x: Tensor, places: Tensor, values: Tensor) -> None:
    """Set one word of each row ``[N, W]``, at its place ``[N, 2]``, to its value ``[N, 1]``.

    ``scatter_`` along the last dimension reads and writes whole rows for that: CANN's ops-nn,
    index/scatter_elements_v2/op_kernel/scatter_elements_v2.h.
    """
    if _is_written_alone(x):
        torch.ops.npu.npu_scatter_nd_update_(x, places, values.squeeze(-1))
    else:
        x.scatter_(1, places[:, 1:], values)


def _is_written_alone(x: Tensor) -> bool:
    """Tell whether ``npu_scatter_nd_update_`` writes to a tensor; a graph of torch.compile has its own ways.

    What is not contiguous is copied before and behind it: CANN's ops-nn, index/scatter_nd_update, aclnn_scatter_nd_
    update.cpp, which lists its dtypes. Places beyond 32 bits have a kernel of their own since CANN 9.0; of 8.5 nobody
    says: op_host/arch32/scatter_nd_update_tiling.cpp.
    """
    return (
        x.device.type == "npu"
        and x.dtype in _WRITTEN
        and 0 < x.numel() <= _MOST
        and x.is_contiguous()
        and not torch.compiler.is_compiling()
    )
