"""How DTensors are divided for the norm's operator, as sequence parallelism divides them.

torch_npu has rules of its own. That for the gradient leaves a divided weight divided, and fails; DTensor keeps what it
has found out about an operator, so that both rules are replaced before the first use.
"""

from __future__ import annotations

import torch


def register() -> None:
    """Replace the rules for ``npu_rms_norm`` and its gradient, where torch has DTensors and torch_npu is there."""
    if not torch.distributed.is_available() or not hasattr(torch.ops.npu, "npu_rms_norm_backward"):
        return
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole = Replicate()

    @register_sharding(torch.ops.npu.npu_rms_norm.default)
    def forward(x, gamma, *_) -> list[tuple[list, list]]:
        """Let rows lie anywhere: ``y`` and ``rstd`` lie where they do."""
        rows = [([Shard(dim)] * 2, [Shard(dim), whole, None]) for dim in range(x.ndim - gamma.ndim)]
        return [([whole] * 2, [whole, whole, None]), *rows]

    @register_sharding(torch.ops.npu.npu_rms_norm_backward.default)
    def backward(dy, x, gamma, rstd) -> list[tuple[list, list]]:
        """Let rows lie anywhere: the gradient of the weight is a sum over all of them."""
        rows = [
            ([Shard(dim), Partial()], [Shard(dim), Shard(dim), whole, Shard(dim)]) for dim in range(x.ndim - gamma.ndim)
        ]
        return [([whole] * 2, [whole] * 4), *rows]
