"""GELU of the gate, by its tanh formula, times up, as one launch, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

_NAMESPACE = __name__.partition(".")[0]
_TANH, _ACTIVATE_LEFT = 1, True  # torch_npu's defaults are tanh and the right half


# The meta kernel of npu_geglu_grad raises in every release up to 2.14, so that it fails under torch.compile and with
# fake tensors. An operator around it has a meta kernel that works.
@torch.library.custom_op(f"{_NAMESPACE}::geglu_grad", mutates_args=())
def _geglu_grad(grad: Tensor, x: Tensor, gelu: Tensor) -> Tensor:
    return torch.ops.npu.npu_geglu_grad(grad, x, gelu, -1, _TANH, _ACTIVATE_LEFT)


@_geglu_grad.register_fake
def _(grad: Tensor, x: Tensor, gelu: Tensor) -> Tensor:
    return torch.empty_like(x)


def launch_geglu(gate_up: Tensor) -> Tensor:
    """Compute it in one launch, without a gradient: ``[M, 2·I]``, the gate first, to ``[M, I]``."""
    return torch.ops.npu.npu_geglu(gate_up, -1, _TANH, _ACTIVATE_LEFT)[0]


def geglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of ``gate_up``. The GELU of the gate, which the operator wants, is computed again."""
    gelu = torch.ops.npu.npu_geglu(gate_up, -1, _TANH, _ACTIVATE_LEFT)[1]
    return _geglu_grad(grad, gate_up, gelu)
