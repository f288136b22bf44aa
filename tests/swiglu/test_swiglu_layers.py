"""The layers as `kernels` binds them: launches, dimensions, devices, frozen parameters, gates that compute both."""

import copy
from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor, nn

from kernels_ext_npu import catalogue
from kernels_ext_npu.selftest.layers.layer_cases import MODULES
from tests.support.rounding import launched
from tests.support.swapped import results

# a module for each, of 32 values
LAYERS = {name: makers[0] for name, makers in MODULES.items() if catalogue.LAYERS[name] == "SwiGLU"}


def made(layer: str) -> nn.Module:
    module, _ = LAYERS[layer]()
    return module


def bound(kernel: ModuleType, layer: str, original: nn.Module, pack: bool = True) -> nn.Module:
    module = copy.deepcopy(original).to("npu")
    if pack and not layer.startswith("Fused"):
        gate, up, _ = kernel.packing.projections(module)
        assert kernel.packing.pack(gate, up) is None
    module.forward = MethodType(getattr(kernel.layers, layer).forward, module)
    return module


@pytest.mark.parametrize("layer", sorted(set(LAYERS) - {"FusedAdaptedMLP", "NormedMLP"}))  # these compute more
def test_inference_is_two_products_and_a_unit(kernel: ModuleType, layer) -> None:
    module = bound(kernel, layer, made(layer))
    x = torch.randn(2, 3, 32, device="npu")
    with torch.no_grad():
        calls = launched(lambda: module(x))
    products = calls.pop("matmul", 0) + calls.pop("addmm", 0) + calls.pop("linear", 0)
    biases = calls.pop("add", 0)
    scales = calls.pop("mul", 0)
    assert products == 2
    assert biases in (0, 2)
    assert scales == (layer in ("ScaledSwiGLUMLP", "GloballyScaledMLP"))
    assert calls in ({"npu_swiglu": 1}, {"npu_geglu": 1}, {"npu_clipped_swiglu": 1})


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 4, 32), (0, 32)])
@pytest.mark.parametrize("layer", LAYERS)
def test_any_number_of_dimensions_on_any_device(kernel: ModuleType, layer, shape) -> None:
    original = made(layer)
    x = torch.randn((2, 3, 32) if layer == "FusedMLPByLayer" else shape)  # the original of that takes three
    expected = results(original, x)
    for device, tolerance in (("npu", 1e-5), ("cpu", 1e-6)):
        for a, b in zip(results(bound(kernel, layer, original).to(device), x.to(device)), expected):
            assert a.shape == b.shape
            assert torch.allclose(a.cpu(), b, rtol=tolerance, atol=tolerance)
    assert results(bound(kernel, layer, original, pack=False).to("meta"), x.to("meta"))[0].shape == x.shape


def test_weights_elsewhere_are_not_packed(kernel: ModuleType) -> None:
    gate, up, _ = kernel.packing.projections(made("SwiGLUMLP"))
    assert kernel.packing.pack(gate, up) == "the weights are not on the NPU"


@pytest.mark.parametrize("layer", ["SwiGLUMLP", "GeGLUMLP"])
def test_a_projection_that_is_missing_is_named(kernel: ModuleType, layer) -> None:
    module = nn.Linear(2, 2)
    module.forward = MethodType(getattr(kernel.layers, layer).forward, module)
    with pytest.raises(AttributeError, match=r"Linear has none of the projections .* gate_proj, up_proj, down_proj"):
        module(torch.ones(2))


@pytest.mark.parametrize("how", ["as one tensor", "as two", "not at all"])
@pytest.mark.parametrize("layer", ["SwiGLUMLP", "GeGLUMLP", "ExactGeGLUMLP", "DroppedMLP"])
def test_a_gate_whose_forward_computes_the_up_too_is_asked_for_both(kernel: ModuleType, layer, how) -> None:
    """As layers with adapters do, which are not packed."""
    module, asked = bound(kernel, layer, made(layer), pack=False), []
    x = torch.linspace(-1, 1, 3 * 32).view(3, 32).npu()
    expected = results(module, x)
    gate, up, _ = kernel.packing.projections(module)

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x)

    def together(gate: nn.Linear, up: nn.Linear, x: Tensor):
        asked.append((gate, up))
        both = [nn.functional.linear(x, each.weight, each.bias) for each in (gate, up)]
        return {"as one tensor": (torch.cat(both, -1), None), "as two": tuple(both), "not at all": None}[how]

    forward._kernels_ext_npu_together = together
    gate.forward = MethodType(forward, gate)
    for found, wanted in zip(results(module, x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert asked == [(gate, up)]
