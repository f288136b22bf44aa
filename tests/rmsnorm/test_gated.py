"""A norm with a gate behind it, of 16 bits: values, gradients and their gradients, and what is kept for them."""

from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor, nn

ACTIVATIONS = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}
EACH = pytest.mark.parametrize("activation", [*ACTIVATIONS])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def module_of(kernel: ModuleType, activation: str, dtype: torch.dtype) -> nn.Module:
    """A norm of 32 values whose weights go through zero, with the forward of the layer."""
    norm = nn.Module()
    norm.weight = nn.Parameter(torch.linspace(-1, 1, 32, dtype=dtype).npu())
    norm.weight.data[7] = 0
    norm.eps, norm.activation = 1e-6, activation
    norm.forward = MethodType(kernel.layers.RMSNormGated.forward, norm)
    return norm


def drawn(dtype: torch.dtype) -> list[Tensor]:
    """x, a gate that lies between other values, and a gradient."""
    torch.manual_seed(3)
    x, gate, grad = torch.randn(2, 50, 3, 32), 3 * torch.randn(2, 50, 3, 64), torch.randn(2, 50, 3, 32)
    x[0, 0] = 0
    return [x.to(dtype), gate.to(dtype)[..., ::2], grad.to(dtype)]


def exact(x: Tensor, gate: Tensor, weight: Tensor, activation: str) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * ACTIVATIONS[activation](gate)


@EACH
@DTYPES
def test_values_and_gradients_are_those_of_float64_rounded_once(kernel: ModuleType, activation: str, dtype) -> None:
    """Half a unit of the dtype, beside a few roundings of float32: in what a row of zeros divides by eps, too."""
    norm, (x, gate, grad) = module_of(kernel, activation, dtype), drawn(dtype)
    leaves = [x.npu().requires_grad_(), gate.npu().requires_grad_(), norm.weight]
    y = norm(*leaves[:2])
    found = [y, *torch.autograd.grad(y, leaves, grad.npu())]
    truth = [t.detach().cpu().double().requires_grad_() for t in leaves]
    wanted = exact(*truth, activation)
    unit = torch.finfo(dtype).eps / 2
    for ours, expected in zip(found, [wanted, *torch.autograd.grad(wanted, truth, grad.double())]):
        assert ours.dtype == dtype
        error = (ours.cpu().double() - expected).abs()
        assert (error <= 1.01 * unit * expected.abs() + 1e-6 * expected.abs().max() + torch.finfo(dtype).tiny).all()


@EACH
def test_what_is_given_is_kept_alone(kernel: ModuleType, activation: str) -> None:
    """And a value a row: in steps it would be x, its norm and the gate in float32."""
    norm, (x, gate, _) = module_of(kernel, activation, torch.bfloat16), drawn(torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x.npu().requires_grad_(), gate.npu().requires_grad_())
    assert sorted(t.numel() * t.element_size() for t in kept) == sorted([2 * x.numel(), 2 * x.numel(), 64, 4 * 300])


@EACH
def test_gradients_have_gradients(kernel: ModuleType, activation: str) -> None:
    """Those of float64, but for roundings to 16 bits on the way: of the value, the first gradient and this one."""
    norm, (x, gate, _) = module_of(kernel, activation, torch.bfloat16), drawn(torch.bfloat16)
    found = []
    for leaves in (
        [x[1].npu().requires_grad_(), gate[1].npu().requires_grad_(), norm.weight],
        [t.detach().cpu().double().requires_grad_() for t in (x[1], gate[1], norm.weight)],
    ):
        y = norm(*leaves[:2]) if leaves[0].device.type == "npu" else exact(*leaves, activation)
        first = torch.autograd.grad(y.sum(), leaves[:2], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for ours, wanted in zip(*found):
        assert (ours.cpu().double() - wanted).norm() <= 4 * 2.0**-8 * wanted.norm()
