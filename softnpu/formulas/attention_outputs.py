"""Define the overloads of the attention operators that write to tensors of the caller, and what prepares for them.

Programs that capture graphs ask for a workspace and for outputs once, and give both to ``.out``. op-plugin,
op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp and FusedInferAttentionScoreKernelNpuOpApi.cpp. The workspace has
no elements here. The outputs are what nobody has written yet, here NaN.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from softnpu.argument_checks import describe, require
from softnpu.formulas import FORMULAS, formula, named_formula
from softnpu.formulas import infer_attention_layouts as layouts
from softnpu.formulas.fusion_attention import npu_fusion_attention_grad_v3, npu_fusion_attention_v3
from softnpu.formulas.fusion_attention_layouts import to_bnsd
from softnpu.formulas.fusion_attention_math import unwritten
from softnpu.formulas.fusion_attention_statistics import STATISTICS
from softnpu.formulas.infer_attention import npu_fused_infer_attention_score, npu_fused_infer_attention_score_v2


def _with_outputs(compute: Callable[..., tuple]) -> None:
    """Register ``compute`` as an operator that writes its first results to ``out``, and returns those tensors."""
    name = compute.__name__
    parameters = list(inspect.signature(compute).parameters.values())
    kind = parameters[-1].kind
    parameters += [
        inspect.Parameter("workspace", kind, default=None),
        inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY),
    ]
    signature = inspect.Signature(parameters)

    def into(*args: Any, **kwargs: Any) -> tuple:
        given = signature.bind(*args, **kwargs).arguments
        out: Sequence[Tensor] = given.pop("out")
        given.pop("workspace", None)
        results = compute(**given)
        for i, (target, result) in enumerate(zip(out, results)):
            fits = target.shape == result.shape and target.dtype == result.dtype
            rule = f"out[{i}] must be {describe(result)}, got {describe(target)}"
            require(fits or result.numel() == 0, f"{name}.out", rule)
            if result.numel():
                target.copy_(result)
        return (*out, *results[len(out) :])

    into.__signature__ = signature  # type: ignore[attr-defined]
    into.__doc__ = f"Compute {name} into the tensors ``out``."
    named_formula(f"{name}.out")(into)


def _with_workspace(compute: Callable[..., tuple]) -> None:
    """Register the operator that makes the workspace of ``compute``."""
    signature = inspect.signature(compute)

    def workspace(*args: Any, **kwargs: Any) -> Tensor:
        signature.bind(*args, **kwargs)
        return torch.empty(0, dtype=torch.uint8)

    workspace.__signature__ = signature  # type: ignore[attr-defined]
    workspace.__doc__ = f"Make the workspace of {compute.__name__}."
    FORMULAS[f"_{compute.__name__}_get_max_workspace"] = workspace


for _compute in (
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
    npu_fusion_attention_v3,
    npu_fusion_attention_grad_v3,
):
    _with_outputs(_compute)
    _with_workspace(_compute)


@formula
def _npu_fusion_attention_v3_infer_output(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the result of version 3, and the maximum and the sum of every row."""
    q, _, v = to_bnsd("_npu_fusion_attention_v3_infer_output", input_layout, head_num, query, key, value)
    sizes = [q.shape[2], head_num] if input_layout == "TND" else [q.shape[0], head_num, q.shape[2]]
    size = [*query.shape[:-1], head_num * v.shape[-1] if input_layout in ("BSH", "SBH") else v.shape[-1]]
    maximum, total = (torch.full((*sizes, STATISTICS), torch.nan) for _ in range(2))
    return query.new_full(size, torch.nan), maximum, total


@formula
def _npu_fusion_attention_grad_v3_infer_output(
    query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None = None, sink: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Allocate the gradients of version 3."""
    gradients = [torch.full_like(t, torch.nan, memory_format=torch.contiguous_format) for t in (query, key, value)]
    dpse = query.new_empty(0) if pse is None else unwritten(pse)
    return *gradients, dpse, torch.empty(()) if sink is None else unwritten(sink)


@formula
def _npu_fused_infer_attention_score_infer_output(
    query: Tensor, value: Tensor, *, input_layout: str = "BSH", quant_scale2: Tensor | None = None,
    block_table: Tensor | None = None, num_heads: int = 1, num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False, query_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Allocate the result and, if wanted, the logarithms of the sums."""
    return _inference("_npu_fused_infer_attention_score_infer_output", query, value, input_layout, quant_scale2,
                      block_table, num_heads, num_key_value_heads, softmax_lse_flag)  # fmt: skip


@formula
def _npu_fused_infer_attention_score_v2_infer_output(
    query: Tensor, value: Tensor, *, query_dtype: int | None = None, value_dtype: int | None = None,
    input_layout: str = "BSH", quant_scale_out: Tensor | None = None, block_table: Tensor | None = None,
    num_query_heads: int = 1, num_key_value_heads: int = 0, return_softmax_lse: bool = False,
    query_rope: Tensor | None = None, out_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Allocate the result and, if wanted, the logarithms of the sums."""
    operator = "_npu_fused_infer_attention_score_v2_infer_output"
    given = [query_dtype, value_dtype, out_dtype]
    if any(dtype is not None for dtype in given):
        raise NotImplementedError(f"{operator}: the software device has no quantised form of the operator")
    return _inference(operator, query, value, input_layout, quant_scale_out, block_table, num_query_heads,
                      num_key_value_heads, return_softmax_lse)  # fmt: skip


def _inference(
    operator: str, query: Tensor, value: Tensor, layout: str, quant_scale: Tensor | None, table: Tensor | None,
    heads: int, kv_heads: int, wants_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if quant_scale is not None:
        raise NotImplementedError(f"{operator}: the software device has no quantised form of the operator")
    require(layout in layouts.LAYOUTS, operator, f"input_layout must be one of {layouts.LAYOUTS}")
    kv_heads = kv_heads or heads
    flat = value.dim() == 3 and (table is not None or layout.startswith("BSH"))
    d = value.shape[-1] // kv_heads if flat else value.shape[-1]
    own = layout.partition("_")[0]
    sizes = {"N": heads, "D": d, "H": heads * d} | {c: n for c, n in zip(own, query.shape) if c in "BST"}
    out = query.new_full([sizes[c] for c in layout.rpartition("_")[2]], torch.nan)
    if not wants_lse:
        return out, torch.empty(0)
    rows = [sizes["T"], heads] if layouts.is_packed(layout) else [sizes["B"], heads, sizes["S"]]
    return out, torch.full((*rows, 1), torch.nan)
