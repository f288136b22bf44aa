"""Where a norm may have what the layers read: on the instance, on its class, or as a property; and its weight."""

from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

HIDDEN, GATE = torch.linspace(-2, 2, 24).view(3, 8), torch.linspace(-1, 1, 24).view(3, 8)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))


def on_the_instance(name: str, value: object) -> nn.Module:
    norm = Norm()
    setattr(norm, name, value)
    return norm


def on_the_class(name: str, value: object) -> nn.Module:
    return type("Given", (Norm,), {name: value})()


def as_a_property(name: str, value: object) -> nn.Module:
    return type("Given", (Norm,), {name: property(lambda self: value)})()


def normed(weight: Tensor, eps: float) -> Tensor:
    x = HIDDEN.double()
    return weight.double() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("made", [on_the_instance, on_the_class, as_a_property])
@pytest.mark.parametrize("name", ["eps", "variance_epsilon"])
def test_eps_is_read(kernel: ModuleType, made, name: str) -> None:
    """So large that one could not miss it; 1e-6: the rounding of float32."""
    norm = made(name, 0.5)
    found = MethodType(kernel.layers.RMSNorm.forward, norm)(HIDDEN)
    torch.testing.assert_close(found.double(), normed(norm.weight, 0.5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("made", [on_the_instance, on_the_class, as_a_property])
def test_the_activation_is_read(kernel: ModuleType, made) -> None:
    norm = made("activation", "sigmoid")
    norm.eps = 1e-6
    found = MethodType(kernel.layers.RMSNormGated.forward, norm)(HIDDEN, GATE)
    expected = normed(norm.weight, 1e-6) * torch.sigmoid(GATE.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(norm: Norm) -> Tensor:
    parametrize.register_parametrization(norm, "weight", Doubled())
    return norm.weight


def a_tensor(norm: Norm) -> Tensor:
    """As FSDP1 leaves it, and whoever computes weights before a forward."""
    weight = 3 * norm.weight.detach()
    del norm.weight
    norm.weight = weight
    return weight


def exchanged(norm: Norm) -> Tensor:
    norm.weight = nn.Parameter(norm.weight.detach() + 1)
    return norm.weight


@pytest.mark.parametrize("change", [parametrized, a_tensor, exchanged])
@pytest.mark.parametrize("layer", ["RMSNorm", "RMSNormGated", "RMSNormZeroCentered", "T5LayerNorm"])
def test_the_weight_is_what_the_norm_has_as_its_weight(kernel: ModuleType, change, layer: str) -> None:
    norm = Norm()
    norm.eps = 1e-6
    forward = MethodType(getattr(kernel.layers, layer).forward, norm)
    forward(HIDDEN)
    weight = change(norm)
    expected = normed(weight + (layer == "RMSNormZeroCentered"), 1e-6)
    torch.testing.assert_close(forward(HIDDEN).double(), expected, rtol=1e-6, atol=1e-6)
