"""Define steps of Adam and AdamW into ``out``; of the forms without it torch_npu has none itself.

CANN's ops-nn, optim/apply_adam_w/docs/aclnnApplyAdamW.md; op-plugin, op_plugin/ops/aclops/ApplyAdamWKernelNpu.cpp and
ApplyAdamKernelNpu.cpp, which say that amsgrad must be False, and cast the scalars to the dtype of the parameter; for
Adam the golden function of test/test_base_ops/test_apply_adam.py. Rounding is inferred: float32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.formulas import named_formula


@named_formula("npu_apply_adam_w.out")
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
    require(not amsgrad and max_grad_norm is None, operator, "amsgrad is not supported")
    var, m, v = _targets(operator, out, grad)
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


@named_formula("npu_apply_adam.out")
def npu_apply_adam_out(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    use_locking: bool | None,
    use_nesterov: bool | None,
    *,
    out: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Step the parameter and both moments, ``out``, in place. The powers of beta are those of this step."""
    var, m, v = _targets("npu_apply_adam", out, grad)
    scalars = torch.tensor([beta1_power, beta2_power, lr, beta1, beta2, epsilon], dtype=var.dtype)
    power1, power2, lr, b1, b2, eps = scalars.float()
    g = grad.float()
    first = m.float() + (1 - b1) * (g - m.float())
    second = v.float() + (1 - b2) * (g.square() - v.float())
    ahead = first * b1 + (1 - b1) * g if use_nesterov else first
    var.copy_(var.float() - lr * (1 - power2).sqrt() / (1 - power1) * ahead / (eps + second.sqrt()))
    m.copy_(first)
    v.copy_(second)
    return var, m, v


def _targets(operator: str, out: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Check the parameter and both moments, and return them."""
    require(len(out) == 3, operator, f"out must be the parameter and two moments, got {len(out)} tensors")
    var, m, v = out
    require_dtypes(operator, {(d,) * 4 for d in FLOATING}, var=var, m=m, v=v, grad=grad)
    same = var.shape == m.shape == v.shape == grad.shape
    require(same, operator, f"{describe(var)}, {describe(m)}, {describe(v)} and {describe(grad)} differ in shape")
    return out
