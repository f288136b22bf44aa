"""Define products with a weight: the linear layer, batches that change places, and the feed-forward network.

op-plugin, docs/zh/custom_APIs/torch_npu, the pages of the operators, and op_plugin/ops/opapi/LinearKernelNpuOpApi.cpp;
the GELU of npu_ffn: CANN's ops-transformer, ffn/ffn/op_kernel/ffn.h, AscendC's form with tanh. Rounding is inferred:
products add up in float32 and are rounded once, the activation is rounded as a factor of the second product.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, float32
from torch.nn import functional as F

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.formulas import formula

MOST_EXPERTS = 256
SIZES_BELOW = 65536
GATED = ("geglu", "swiglu", "reglu")


@formula
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x · weightᵀ + bias`` for x [M, K] and weight [N, K], in float16 or float32."""
    operator = "npu_linear"
    require_dtypes(operator, {(d, d) for d in (float16, float32)}, input=input, weight=weight)
    fits = input.dim() == weight.dim() == 2 and input.shape[1] == weight.shape[1]
    require(fits, operator, f"needs [M, K] and [N, K], got {describe(input)} and {describe(weight)}")
    out = input.float() @ weight.float().T
    if bias is not None:
        fits = bias.shape == weight.shape[:1] and bias.dtype == input.dtype
        require(fits, operator, f"bias must be {input.dtype} [{len(weight)}], got {describe(bias)}")
        out = out + bias.float()
    return out.to(input.dtype)


@formula
def npu_linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight.

    The operator has no page of its own. LinearKernelNpuOpApi.cpp launches aclnnMm twice, whose page in CANN's ops-nn
    (matmul/mat_mul_v3/docs) lists bfloat16 for Atlas A2 and A3.
    """
    tensors = {"grad": grad, "input": input, "weight": weight}
    require_dtypes("npu_linear_backward", {(d, d, d) for d in FLOATING}, **tensors)
    fits = grad.dim() == input.dim() == weight.dim() == 2 and (len(grad), len(weight)) == (len(input), grad.shape[1])
    rule = f"needs [M, N], [M, K] and [N, K], got {describe(grad)}, {describe(input)} and {describe(weight)}"
    require(fits and input.shape[1] == weight.shape[1], "npu_linear_backward", rule)
    g = grad.float()
    return (g @ weight.float()).to(grad.dtype), (g.T @ input.float()).to(grad.dtype).contiguous()


@formula
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """Multiply [B, M, K], or [M, B, K] with perm_x1 [1, 0, 2], with [B, K, N], and return [M, B, N].

    With a batch_split_factor F the result is the F parts of ``[M, B · N]``, [F, M, B · N / F].
    """
    operator = "npu_transpose_batchmatmul"
    if scale is not None:
        raise NotImplementedError(f"{operator}: the software device has no form of the operator with scale")
    require(bias is None, operator, "bias is not supported")
    require_dtypes(operator, {(d, d) for d in FLOATING}, input=input, weight=weight)
    require(input.dim() == weight.dim() == 3, operator, f"needs three dimensions, got {describe(input)}")
    perms = (perm_x1 or [0, 1, 2], perm_x2 or [0, 1, 2], perm_y or [1, 0, 2])
    known = perms[0] in ([0, 1, 2], [1, 0, 2]) and perms[1] == [0, 1, 2] and perms[2] == [1, 0, 2]
    require(known, operator, f"perm_x1 is [0, 1, 2] or [1, 0, 2], perm_x2 [0, 1, 2], perm_y [1, 0, 2], got {perms}")
    x = input.permute(perms[0])
    (b, _, k), (b_w, k_w, n), factor = x.shape, weight.shape, batch_split_factor or 1
    require(b == b_w and k == k_w, operator, f"{describe(input)} and {describe(weight)} do not fit as {perms[0]}")
    require(k % 16 == n % 16 == 0, operator, f"K and N must be multiples of 16, got {k} and {n}")
    joined = k * b if perms[0] == [1, 0, 2] else k
    require(max(joined, b, n) < SIZES_BELOW, operator, f"sizes must be below {SIZES_BELOW}, got {b}, {joined}, {n}")
    rule = f"batch_split_factor must divide N ({n}), got {batch_split_factor}"
    require(1 <= factor <= n and n % factor == 0, operator, rule)
    out = (x.float() @ weight.float()).to(input.dtype).transpose(0, 1)
    if factor > 1:
        out = out.flatten(1).unflatten(1, (factor, -1)).transpose(0, 1)
    return out.contiguous()


@formula
def npu_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: list[int] | None = None,
    expert_tokens_index: list[int] | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    deq_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    antiquant_scale1: Tensor | None = None,
    antiquant_scale2: Tensor | None = None,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    inner_precise: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``activation(x · W1 + b1) · W2 + b2`` for x [..., K1], W1 [K1, N1] and W2 [N1, K1].

    With experts the weights are [E, K1, N1] and [E, N1, K1]; expert_tokens says how many rows each has,
    expert_tokens_index where they end. inner_precise 1 rounds the first product of float16 before the activation.
    """
    operator = "npu_ffn"
    given = [scale, offset, deq_scale1, deq_scale2, antiquant_scale1, antiquant_scale2, antiquant_offset1]
    if any(t is not None for t in (*given, antiquant_offset2)) or activation in GATED:
        raise NotImplementedError(f"{operator}: the software device has no quantised and no gated form of the operator")
    require(activation in ACTIVATIONS, operator, f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")
    require_dtypes(operator, {(d,) * 3 for d in (float16, bfloat16)}, x=x, weight1=weight1, weight2=weight2)
    precise = inner_precise or 0
    rule = f"inner_precise must be 0, or 1 with float16, got {precise}"
    require(precise in ((0, 1) if x.dtype == float16 else (0,)), operator, rule)
    grouped = expert_tokens is not None or expert_tokens_index is not None
    fits = 2 <= x.dim() <= 8 and weight1.dim() == weight2.dim() == 2 + grouped
    fits = fits and x.shape[-1] == weight1.shape[-2] == weight2.shape[-1] and weight1.shape[-1] == weight2.shape[-2]
    shapes = f"{describe(x)}, {describe(weight1)}, {describe(weight2)}"
    require(fits, operator, f"needs [..., K1], [{'E, ' * grouped}K1, N1] and [{'E, ' * grouped}N1, K1], got {shapes}")
    rule = f"K1 and N1 must be below {SIZES_BELOW}, got {shapes}"
    require(max(weight1.shape[-2:]) < SIZES_BELOW, operator, rule)
    for name, bias, weight in (("bias1", bias1, weight1), ("bias2", bias2, weight2)):
        dtype = float16 if x.dtype == float16 else float32
        shape = (*weight.shape[:-2], weight.shape[-1])
        fits = bias is None or (bias.dtype == dtype and bias.shape == shape)
        require(fits, operator, f"{name} must be {dtype} {list(shape)}, got {bias if bias is None else describe(bias)}")
    rows = x.reshape(-1, x.shape[-1])
    counts = _counts(operator, len(rows), len(weight1) if grouped else 1, expert_tokens, expert_tokens_index)
    parts = []
    for i, part in enumerate(rows.float().split(counts)):
        w1, w2 = (t[i] if grouped else t for t in (weight1, weight2))
        b1, b2 = (t if t is None or not grouped else t[i] for t in (bias1, bias2))
        hidden = part @ w1.float() + (0 if b1 is None else b1.float())
        hidden = ACTIVATIONS[activation](hidden.half().float() if precise else hidden).to(x.dtype).float()
        parts.append((hidden @ w2.float() + (0 if b2 is None else b2.float())).to(x.dtype))
    return torch.cat(parts).view(*x.shape[:-1], -1)


ACTIVATIONS = {
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def _counts(operator: str, rows: int, experts: int, tokens: list[int] | None, ends: list[int] | None) -> list[int]:
    """Return how many rows every expert has."""
    if tokens is None and ends is None:
        return [rows]
    require(tokens is None or ends is None, operator, "expert_tokens and expert_tokens_index exclude each other")
    given = list(tokens or ends or [])
    counts = given if tokens is not None else [b - a for a, b in zip([0, *given], given)]
    fits = len(counts) == experts <= MOST_EXPERTS and min(counts) >= 0 and sum(counts) == rows
    require(fits, operator, f"{experts} experts, at most {MOST_EXPERTS}, must have {rows} rows in all, got {given}")
    return counts
