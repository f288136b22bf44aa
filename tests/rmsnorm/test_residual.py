"""A sum and its norm in one launch: values, and where it is two."""

import types
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import softnpu


def norm_with(kernel: ModuleType, layer: str, size: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    norm = LlamaRMSNorm(size).to(dtype).npu()
    norm.weight.data.copy_(torch.randn(size))
    norm.forward = types.MethodType(getattr(kernel.layers, layer).forward, norm)
    return norm


def operands(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(size)
    return torch.randn(400, 1, size).to(dtype), torch.randn(400, 1, size).to(dtype)


def launches(kernel: ModuleType, norm: nn.Module, *given: Tensor) -> tuple[tuple[Tensor, Tensor], list[str]]:
    softnpu.reset_counters()
    found = kernel.add_then_norm(norm, *(tensor.to("npu") for tensor in given))
    return found, [name for name in ("npu_add_rms_norm", "add", "npu_rms_norm") if softnpu.counters().get(name)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 2560])
def test_the_norm_is_no_further_from_float64_than_the_one_that_was_written(kernel, dtype, size) -> None:
    """Both add, and round before they multiply with the weight: means over some 10,000 values, to 2% of themselves."""
    norm, (x, residual) = norm_with(kernel, "RMSNorm", size, dtype), operands(size, dtype)
    (found, total), counted = launches(kernel, norm, x, residual)
    assert counted == ["npu_add_rms_norm"]
    written = LlamaRMSNorm(size).to(dtype)
    written.weight.data.copy_(norm.weight.data.cpu())
    exact = x.double() + residual.double()
    assert torch.equal(total.cpu(), x + residual)
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * written.weight.double()
    errors = [(y.double() - exact).abs().mean() for y in (found.cpu(), written(x + residual))]
    assert errors[0] <= 1.02 * errors[1]


@torch.no_grad()
@pytest.mark.parametrize("layer", ["RMSNormCastLast", "RMSNormZeroCentered", "RMSNormWeightless"])
def test_norms_that_round_last_stay_two_launches(kernel, layer: str) -> None:
    norm, given = norm_with(kernel, layer, 64, torch.bfloat16), operands(64, torch.bfloat16)
    (found, total), counted = launches(kernel, norm, *given)
    assert "npu_add_rms_norm" not in counted
    assert torch.equal(found, norm(total))
    together = launches(kernel, norm_with(kernel, layer, 64, torch.float32), *operands(64, torch.float32))[1]
    assert (together == ["npu_add_rms_norm"]) == (layer == "RMSNormCastLast")


@torch.no_grad()
def test_a_norm_with_another_forward_stays_two_launches(kernel) -> None:
    norm = norm_with(kernel, "RMSNorm", 64, torch.bfloat16)
    inner = norm.forward
    norm.forward = lambda x: inner(x) * 2
    found, counted = launches(kernel, norm, *operands(64, torch.bfloat16))
    assert counted == ["add", "npu_rms_norm"]
    assert torch.equal(found[0], inner(found[1]) * 2)
    norm = norm_with(kernel, "RMSNorm", 64, torch.float32)
    assert launches(kernel, norm, *operands(64, torch.bfloat16))[1] == ["add", "npu_rms_norm"]
