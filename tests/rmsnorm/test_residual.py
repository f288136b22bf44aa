"""Where a sum and its norm are two launches."""

import types
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.support import npu_counts


def norm_with(kernel: ModuleType, layer: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    norm = LlamaRMSNorm(64).to(dtype).npu()
    norm.weight.data.copy_(torch.randn(64))
    norm.forward = types.MethodType(getattr(kernel.layers, layer).forward, norm)
    return norm


def launches(kernel: ModuleType, norm: nn.Module, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], list[str]]:
    x, residual = torch.randn(2, 400, 1, 64, dtype=dtype).npu()
    npu_counts.reset()
    found = kernel.add_then_norm(norm, x, residual)
    return found, [name for name in ("npu_add_rms_norm", "add", "npu_rms_norm") if npu_counts.read().get(name)]


@torch.no_grad()
@pytest.mark.parametrize("layer", ["RMSNormCastLast", "RMSNormZeroCentered", "RMSNormWeightless"])
def test_norms_that_round_last_stay_two_launches(kernel, layer: str) -> None:
    norm = norm_with(kernel, layer, torch.bfloat16)
    (found, total), counted = launches(kernel, norm, torch.bfloat16)
    assert "npu_add_rms_norm" not in counted
    assert torch.equal(found, norm(total))
    together = launches(kernel, norm_with(kernel, layer, torch.float32), torch.float32)[1]
    assert (together == ["npu_add_rms_norm"]) == (layer == "RMSNormCastLast")


@torch.no_grad()
def test_a_norm_with_another_forward_stays_two_launches(kernel) -> None:
    norm = norm_with(kernel, "RMSNorm", torch.bfloat16)
    inner = norm.forward
    norm.forward = lambda x: inner(x) * 2
    found, counted = launches(kernel, norm, torch.bfloat16)
    assert counted == ["add", "npu_rms_norm"]
    assert torch.equal(found[0], inner(found[1]) * 2)
    norm = norm_with(kernel, "RMSNorm", torch.float32)
    assert launches(kernel, norm, torch.bfloat16)[1] == ["add", "npu_rms_norm"]
