"""How long a launch takes at least: what its products need at the peak of a chip, or its bytes at the memory's.

A roofline is an estimate from published peak figures, and a bound from below: no real launch reaches them, and starting
one takes time too. S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

SOURCE = (
    "https://github.com/Ascend/msmodeling/blob/1e5a50b1a025a6658a277aa963c87691dc279f4f/tensor_cast/device.py: device "
    "profiles of MindStudio Modeling"
)


@dataclass(frozen=True)
class Soc:
    """A device as torch_npu sees it, of which a 910C has two.

    The peaks of products are in operations a second, by dtype; the memory is in bytes, its bandwidth in bytes a second.
    """

    name: str
    profile: str
    bfloat16: float
    float16: float
    float32: float
    memory: float = 64 * 2**30
    bandwidth: float = 1.6 * 2**40


SOCS = {
    "910b": Soc("Ascend 910B, 313 TFLOPS", "ATLAS_800_A2_313T_64G", 294.9e12, 313e12, 83e12),
    "910b-280": Soc("Ascend 910B, 280 TFLOPS", "ATLAS_800_A2_280T_64G", 245.8e12, 280e12, 75e12),
    "910b-376": Soc("Ascend 910B, 376 TFLOPS", "ATLAS_800_A2_376T_64G", 353.9e12, 376e12, 99.5e12),
    "910c": Soc("one die of an Ascend 910C, 752 TFLOPS", "ATLAS_800_A3_752T_128G_DIE", 353.9e12, 376e12, 99.5e12),
    "910c-560": Soc("one die of an Ascend 910C, 560 TFLOPS", "ATLAS_800_A3_560T_128G_DIE", 245.8e12, 280e12, 75e12),
}


def seconds(soc: Soc, operator: OpOverload, args: tuple, kwargs: dict, result: Any, moved: int) -> float:
    """Return the least seconds of a launch that moves so many bytes."""
    products = flops(operator, args, kwargs, result)
    dtype = next((value.dtype for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)), None)
    peak = getattr(soc, str(dtype).rpartition(".")[2], soc.float32)
    return max(moved / soc.bandwidth, products / peak)


def flops(operator: OpOverload, args: tuple, kwargs: dict, result: Any) -> float:
    """Count the additions and multiplications of matrix products and attention; others are bound by memory."""
    name = operator._schema.name.partition("::")[2]
    if name in _FORMULAS:
        names = [argument.name for argument in operator._schema.arguments]
        return _FORMULAS[name](dict(zip(names, args)) | kwargs, result)
    formula = flop_registry.get(operator._overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def _matmul(given: dict[str, Any], result: Any) -> float:
    return 2 * result.numel() * given["self"].shape[-1]


def _matmul_backward(given: dict[str, Any], result: Any) -> float:
    wanted = sum(gradient is not None for gradient in result)
    return 2 * given["grad"].numel() * given["self"].shape[-1] * wanted


def _npu_grouped_matmul(given: dict[str, Any], result: Any) -> float:
    return sum(2 * x.numel() * w.shape[-1] for x, w in zip(given["x"], given["weight"]))


def _attention(given: dict[str, Any], result: Any) -> float:
    """Count two products, half of which a causal mask leaves out."""
    query, key = given["query"], given["key"]
    layout = given["input_layout"]
    length = key.shape[0] if layout in ("SBH", "TND") else key.shape[2 if layout == "BNSD" else 1]
    causal = given.get("sparse_mode") in (2, 3)
    return 4 * query.numel() * length * (0.5 if causal else 1)


def _attention_backward(given: dict[str, Any], result: Any) -> float:
    """Count five products in place of two."""
    return 2.5 * _attention(given, result)


_FORMULAS: dict[str, Callable[[dict[str, Any], Any], float]] = {
    "matmul": _matmul,
    "matmul_backward": _matmul_backward,
    "npu_grouped_matmul": _npu_grouped_matmul,
    "npu_fusion_attention": _attention,
    "npu_fusion_attention_v3": _attention,
    "npu_fusion_attention_grad": _attention_backward,
    "npu_fusion_attention_grad_v3": _attention_backward,
}
