"""Take int32 indices and targets where the device does and the CPU takes int64 alone.

Sources: the lists of dtypes in CANN's ops-nn, ``aclnn_nll_loss.cpp``, ``aclnn_nll_loss2d.cpp``,
``aclnn_multilabel_margin_loss.cpp``, ``aclnn_put.cpp``, ``aclnn_index_fill.cpp`` and ``aclnn_index_copy.cpp``; for
``take``, aclnnTake's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# the argument that holds indices
INDEX = {
    "index_copy": "index", "index_copy_": "index", "index_fill": "index", "index_fill_": "index",
    "multilabel_margin_loss_backward": "target", "multilabel_margin_loss_forward": "target",
    "nll_loss2d_backward": "target", "nll_loss2d_forward": "target", "nll_loss_backward": "target",
    "nll_loss_forward": "target", "put_": "index", "take": "index",
}  # fmt: skip


def with_int64_indices(op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` in a form that takes int32 indices too."""
    name = INDEX[op._schema.name.partition("::")[2]]
    position = next(i for i, a in enumerate(op._schema.arguments) if a.name == name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            return run(*args, **kwargs | {name: _as_int64(kwargs[name])})
        return run(*args[:position], _as_int64(args[position]), *args[position + 1 :], **kwargs)

    return call


def _as_int64(index: torch.Tensor) -> torch.Tensor:
    return index.long() if index.dtype == torch.int32 else index
