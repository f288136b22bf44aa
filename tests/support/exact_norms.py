"""What norms compute, in the dtype of their input: float64 where it is a truth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.matching.lookup import find_reference


def exact(module: nn.Module, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Compute what the module computes, without any rounding but that of its weights."""
    reference = find_reference(type(module))
    assert reference is not None
    layer = reference.layer(module)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = None if layer == "RMSNormWeightless" else getattr(module, "weight", None)
    if layer == "MambaRMSNormGated" and gate is not None:
        x, gate = x * F.silu(gate), None
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * (weight + 1 if layer == "RMSNormZeroCentered" else weight)
    if gate is not None:
        y = y * (torch.sigmoid(gate) if module.activation == "sigmoid" else F.silu(gate))
    return y
