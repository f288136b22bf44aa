"""What a norm has as its weight when it is called is what counts: its parameter, another one, or a tensor."""

from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.rmsnorm.test_functional import exact

HIDDEN = torch.linspace(-2, 2, 24).view(3, 8)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))


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
    expected = exact(HIDDEN, weight + (layer == "RMSNormZeroCentered"), 1e-6)
    torch.testing.assert_close(forward(HIDDEN).double(), expected, rtol=1e-6, atol=1e-6)  # the rounding of float32
