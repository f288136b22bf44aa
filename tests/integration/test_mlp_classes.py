"""Every gated MLP of transformers on the software device: the values and gradients of its own forward."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.coverage.survey import classes
from kernels_ext_npu.matching.kinds import KEPT
from kernels_ext_npu.matching.lookup import find_reference
from tests.support.counted import counted
from tests.support.mlp_classes import inputs, instance, is_served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("registered")]
SERVED = [cls for cls in classes(MLPS) if is_served(cls)]


def swapped(module: nn.Module) -> nn.Module:
    """A copy on the device, with its kernel."""
    model = nn.ModuleDict({"mlp": copy.deepcopy(module)}).to("npu")
    row, *_ = [row for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(model)) if row.path == "mlp"]
    assert row.swapped, row.reason
    return model["mlp"]


def results(module: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    """The result, and the gradients of argument, weights and biases."""
    leaf = x.detach().requires_grad_()
    y = (call or module)(leaf)
    module.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    parts = [(a.cpu().double() - c).norm() / c.norm() for a, c in zip(found, truth)]
    return torch.stack(parts).norm().item()


@counted
def test_every_gated_mlp_is_served_or_kept_with_a_reason() -> None:
    kept = {name for names in KEPT[MLPS.name].values() for name in names}
    assert {cls.__name__ for cls in classes(MLPS) if not is_served(cls)} == kept


@counted
def test_the_families_are_served() -> None:
    assert Counter(find_reference(cls).module.__name__ for cls in SERVED) == {
        "LlamaMLP": 131,
        "Phi3MLP": 9,
        "Qwen2_5_VLMLP": 9,
        "GraniteMoeSharedMLP": 3,
        "T5GemmaMLP": 3,
        "Lfm2MLP": 2,
        "Gemma3nTextMLP": 1,
        "Llama4TextMLP": 1,
        "RecurrentGemmaMlp": 1,
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_float32_results_and_gradients_are_the_originals(subtests, activation, bias) -> None:
    """To 2e-6 of the norm: three products in float32, each with sums in another order."""
    for cls in SERVED:
        with subtests.test(cls.__name__):
            original = instance(cls, activation, bias)
            x = inputs(original)
            device, moved = swapped(original), x.to("npu")
            softnpu.reset_counters()
            found = results(device, moved)
            counters = softnpu.counters()
            assert counters["stream_syncs"] == 0
            if type(getattr(original, "gate_proj", None)).__name__ != "Gemma4ClippableLinear":
                assert "cat" not in counters
            assert counters.keys() & {"npu_swiglu", "npu_geglu"}
            for a, b in zip(found, results(original, x)):
                assert a.dtype == b.dtype
                assert (a.cpu() - b).norm() <= 2e-6 * b.norm()


def test_bfloat16_is_no_further_from_float64_than_the_original(subtests) -> None:
    """In root mean square over the result and all gradients: single ones are too small to compare roundings by."""
    for cls in SERVED:
        with subtests.test(cls.__name__):
            original = instance(cls).to(torch.bfloat16)
            x = inputs(original, torch.bfloat16)
            truth = results(copy.deepcopy(original).double(), x.double())
            own, found = results(original, x), results(swapped(original), x.to("npu"))
            assert [a.dtype for a in found] == [b.dtype for b in own]
            assert error(found, truth) <= error(own, truth)


@pytest.mark.parametrize("activation", ["relu", "gelu", "quick_gelu", "tanh"])
def test_other_activations_keep_their_forward(activation) -> None:
    llama = next(cls for cls in SERVED if cls.__name__ == "LlamaMLP")
    model = nn.ModuleDict({"mlp": instance(llama, activation)}).to("npu")
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert not row.swapped
    assert row.reason.startswith("its activation is ")
    assert row.reason.endswith("the kernels have silu and gelu (tanh)")


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"])
def test_an_activation_is_told_by_its_values(activation) -> None:
    llama = next(cls for cls in SERVED if cls.__name__ == "LlamaMLP")
    model = nn.ModuleDict({"mlp": instance(llama, activation)}).to("npu")
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert row.kernel == ("SwiGLUMLP" if activation in ("silu", "swish") else "GeGLUMLP")
    assert row.swapped


def test_one_class_with_two_activations_in_one_model() -> None:
    llama = next(cls for cls in SERVED if cls.__name__ == "LlamaMLP")
    names = ["silu", "gelu_pytorch_tanh", "relu", "silu"]
    originals = nn.ModuleList(instance(llama, name) for name in names)
    model = kernels_ext_npu.kernelize(copy.deepcopy(originals).to("npu"))
    assert [row.kernel for row in kernels_ext_npu.report(model)] == ["SwiGLUMLP", "GeGLUMLP", "SwiGLUMLP", "SwiGLUMLP"]
    assert [row.swapped for row in kernels_ext_npu.report(model)] == [True, True, False, True]
    x = inputs(originals[0])
    for a, b in zip(model, originals):
        assert torch.allclose(a(x.npu()).cpu(), b(x), rtol=1e-5, atol=1e-5)
