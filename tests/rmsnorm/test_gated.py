"""A norm with a gate behind it, of 16 bits: values, gradients and theirs, what is kept, and what is launched."""

from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from kernels_ext_npu.measuring.costs import Cost

ACTIVATIONS = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}
ORIGINALS = {"RMSNormGated": Qwen3NextRMSNormGated, "RMSNormGatedCastLast": KimiLinearRMSNormGated}
LAYERS = pytest.mark.parametrize("layer", [*ORIGINALS])
EACH = pytest.mark.parametrize("activation", [*ACTIVATIONS])


def originals(layer: str, activation: str, dtype: torch.dtype) -> nn.Module:
    """A norm of 32 values of transformers, whose weights go through zero."""
    norm = ORIGINALS[layer](32)
    norm.weight.data = torch.linspace(-1, 1, 32).to(dtype)
    norm.weight.data[7] = 0
    norm.activation = activation
    return norm


def ours(kernel: ModuleType, layer: str, activation: str, dtype: torch.dtype) -> nn.Module:
    """The same on the device, with the forward of the layer."""
    norm = originals(layer, activation, dtype).npu()
    norm.forward = MethodType(getattr(kernel.layers, layer).forward, norm)
    return norm


def drawn(dtype: torch.dtype, shift: float = 0.0, rows: int = 50) -> list[Tensor]:
    """x, a gate that lies between other values, and a gradient."""
    torch.manual_seed(3)
    x, gate, grad = torch.randn(2, rows, 3, 32), 3 * torch.randn(2, rows, 3, 64) + shift, torch.randn(2, rows, 3, 32)
    x[0, 0] = 0
    return [x.to(dtype), gate.to(dtype)[..., ::2], grad.to(dtype)]


def exact(x: Tensor, gate: Tensor, weight: Tensor, activation: str) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * ACTIVATIONS[activation](gate)


def results(norm: nn.Module, x: Tensor, gate: Tensor, grad: Tensor) -> list[Tensor]:
    """The value, and the gradients of x, of the gate and of the weight."""
    x, gate, grad = (t.to(norm.weight.device) for t in (x, gate, grad))
    leaves = [x.requires_grad_(), gate.requires_grad_(), norm.weight]
    y = norm(*leaves[:2])
    return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, leaves, grad))]


def truth(x: Tensor, gate: Tensor, grad: Tensor, weight: Tensor, activation: str) -> list[Tensor]:
    leaves = [t.detach().cpu().double().requires_grad_() for t in (x, gate, weight)]
    y = exact(*leaves, activation)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]


@LAYERS
@EACH
@pytest.mark.parametrize("shift", [-12.0, 0.0, 12.0])
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
)
def test_each_result_is_no_further_from_float64_than_the_originals(
    kernel: ModuleType, layer: str, activation: str, shift: float, dtype, of_weight
) -> None:
    """1% for which values are rounded up; where gates let nothing through, too."""
    arguments = drawn(dtype, shift)
    original = originals(layer, activation, of_weight)
    found = results(ours(kernel, layer, activation, of_weight), *arguments)
    own, wanted = results(original, *arguments), truth(*arguments, original.weight, activation)
    for one, other, expected in zip(found, own, wanted):
        assert one.dtype == other.dtype
        allowed = (other.double() - expected).norm() * 1.01 + 1e-6 * expected.norm()
        assert (one.double() - expected).norm() <= allowed


@LAYERS
@EACH
@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
def test_gradients_may_lie_in_any_order(kernel: ModuleType, layer: str, activation: str, order) -> None:
    """As they do behind a transpose: they are those of the same gradient in the order of x."""
    norm, (x, gate, grad) = ours(kernel, layer, activation, torch.bfloat16), drawn(torch.bfloat16)
    lying = grad.npu().permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    assert not lying.is_contiguous()
    for found, expected in zip(results(norm, x, gate, lying), results(norm, x, gate, grad)):
        assert torch.equal(found, expected)


@LAYERS
@EACH
def test_what_is_given_is_kept_alone(kernel: ModuleType, layer: str, activation: str) -> None:
    """And a value a row: in steps it would be x, its norm and the gate in float32."""
    norm, (x, gate, _) = ours(kernel, layer, activation, torch.bfloat16), drawn(torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x.npu().requires_grad_(), gate.npu().requires_grad_())
    assert sorted(t.numel() * t.element_size() for t in kept) == sorted([2 * x.numel(), 2 * x.numel(), 64, 4 * 300])


@LAYERS
@EACH
def test_gradients_have_gradients(kernel: ModuleType, layer: str, activation: str) -> None:
    """Those of float64, but for roundings to 16 bits on the way: of the value, the first gradient and this one."""
    norm, (x, gate, _) = ours(kernel, layer, activation, torch.bfloat16), drawn(torch.bfloat16)
    found = []
    for leaves in (
        [x[1].npu().requires_grad_(), gate[1].npu().requires_grad_(), norm.weight],
        [t.detach().cpu().double().requires_grad_() for t in (x[1], gate[1], norm.weight)],
    ):
        y = norm(*leaves[:2]) if leaves[0].device.type == "npu" else exact(*leaves, activation)
        first = torch.autograd.grad(y.sum(), leaves[:2], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for one, wanted in zip(*found):
        assert (one.cpu().double() - wanted).norm() <= 4 * 2.0**-8 * wanted.norm()


@LAYERS
@EACH
def test_several_gradients_at_once_are_each_by_itself(kernel: ModuleType, layer: str, activation: str) -> None:
    """To two roundings of bfloat16, relative to the norm: operators of torch give them, and others a single one."""
    norm, (x, gate, grad) = ours(kernel, layer, activation, torch.bfloat16), drawn(torch.bfloat16)
    leaves = [x.npu().requires_grad_(), gate.npu().requires_grad_(), norm.weight]
    y, grads = norm(*leaves[:2]), torch.stack((grad, grad.sin())).npu()
    found = torch.autograd.grad(y, leaves, grads, retain_graph=True, is_grads_batched=True)
    for n, one in enumerate(grads):
        for both, expected in zip(found, torch.autograd.grad(y, leaves, one, retain_graph=True)):
            assert (both[n] - expected).double().norm() <= 2 * 2.0**-8 * expected.double().norm()


@LAYERS
def test_torch_func_and_vmap_give_what_the_original_gives(kernel: ModuleType, layer: str) -> None:
    """To two roundings of bfloat16, relative to the norm."""
    found = []
    for norm in (ours(kernel, layer, "silu", torch.bfloat16), originals(layer, "silu", torch.bfloat16)):
        x, gate = (t.contiguous().to(norm.weight.device) for t in drawn(torch.bfloat16)[:2])
        gradient = torch.func.grad(lambda x, norm=norm, gate=gate: norm(x, gate).float().square().sum())
        found.append([t.detach().cpu().double() for t in (torch.func.vmap(norm)(x, gate), gradient(x))])
    for one, expected in zip(*found):
        assert (one - expected).norm() <= 2 * 2.0**-8 * expected.norm()


@pytest.mark.parametrize(
    ("layer", "activation", "launches", "passes"),
    [("RMSNormGated", "silu", 8, 24), ("RMSNormGatedCastLast", "sigmoid", 19, 77)],
)
def test_a_step_launches_and_moves_less_than_its_steps(
    kernel: ModuleType, layer: str, activation: str, launches: int, passes: float
) -> None:
    """In launches and in passes over x with what is inside of operators: the original's steps are 34 and 110."""
    x, gate, grad = (t.npu() for t in drawn(torch.bfloat16, rows=400))
    gate = gate.contiguous()
    norm = ours(kernel, layer, activation, torch.bfloat16)
    y = norm(x.requires_grad_(), gate.requires_grad_())
    torch.autograd.grad(y, [x, gate, norm.weight], grad)  # what the first call alone does
    with Cost() as cost:
        y = norm(x, gate)
        torch.autograd.grad(y, [x, gate, norm.weight], grad)
    assert cost.launches.total() <= launches
    assert cost.bytes.total() <= passes * 2 * x.numel()
