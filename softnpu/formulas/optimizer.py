"""Define a step of AdamW, ``npu_apply_adam_w.out``; the form without out has torch_npu none of itself.

CANN's ops-nn, optim/apply_adam_w/docs/aclnnApplyAdamW.md; op-plugin, op_plugin/ops/aclops/ApplyAdamWKernelNpu.cpp,
which says that amsgrad must be False, and casts the scalars to the dtype of the parameter. Rounding is inferred:
float32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.formulas import formula_of


@formula_of("npu_apply_adam_w.out")
def npu_apply_adam_w_out(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Step the parameter and both moments, ``out``, in place. The powers of beta are those before the step."""
    operator = "npu_apply_adam_w"
    require(len(out) == 3, operator, f"out must be the parameter and two moments, got {len(out)} tensors")
    require(not amsgrad and max_grad_norm is None, operator, "amsgrad is not supported")
    var, m, v = out
    require_dtypes(operator, {(d,) * 4 for d in FLOATING}, var=var, m=m, v=v, grad=grad)
    same = var.shape == m.shape == v.shape == grad.shape
    require(same, operator, f"{describe(var)}, {describe(m)}, {describe(v)} and {describe(grad)} differ in shape")
    scalars = torch.tensor([beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon], dtype=var.dtype)
    power1, power2, lr, decay, b1, b2, eps = scalars.float()
    g = -grad.float() if maximize else grad.float()
    first = m.float() * b1 + g * (1 - b1)
    second = v.float() * b2 + g.square() * (1 - b2)
    step = first / (1 - power1 * b1) / ((second / (1 - power2 * b2)).sqrt() + eps)
    var.copy_(var.float() * (1 - lr * decay) - lr * step)
    m.copy_(first)
    v.copy_(second)
    return var, m, v
