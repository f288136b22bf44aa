"""The forget gate of Kimi delta attention as one node: values, derivatives, what it keeps, launches and moves."""

from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from tests.support.swapped import results

SIZES = {"hidden_size": 32, "linear_num_heads": 3, "linear_head_dim": 16}


def original(dtype: torch.dtype, gate_dtype: torch.dtype) -> KimiLinearForgetGate:
    """One of transformers, whose gates forget nothing, some, and nearly everything."""
    torch.manual_seed(5)
    gate = KimiLinearForgetGate(KimiLinearConfig(**SIZES))
    for weight in gate.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    gate.dt_bias.data = torch.linspace(-25, 25, 48)
    gate.to(dtype)
    for name in ("dt_bias", "A_log"):
        setattr(gate, name, torch.nn.Parameter(getattr(gate, name).to(gate_dtype)))
    return gate


def exact(gate: KimiLinearForgetGate, x: Tensor) -> list[Tensor]:
    wide = original(torch.float64, torch.float64)
    wide.load_state_dict(gate.state_dict())

    def formula(x: Tensor) -> Tensor:
        forget = (wide.f_b_proj(wide.f_a_proj(x)) + wide.dt_bias).view(*x.shape[:2], -1, 16)
        return -wide.A_log.exp() * F.softplus(forget, threshold=1000)

    return results(wide, x.double(), call=formula)


@pytest.mark.parametrize(
    ("dtype", "gate_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_values_and_gradients_are_no_further_from_float64_than_the_originals(
    kernel: ModuleType, dtype, gate_dtype
) -> None:
    """Beside 1e-6: sums of float32 in another order."""
    own = original(dtype, gate_dtype)
    ours = original(dtype, gate_dtype).npu()
    ours.forward = MethodType(kernel.layers.ForgetGate.forward, ours)
    x = torch.randn(2, 7, 32).to(dtype)
    for found, other, truth in zip(results(ours, x.npu()), results(own, x), exact(own, x), strict=True):
        assert (found.dtype, found.shape) == (other.dtype, other.shape)
        assert (found.cpu().double() - truth).norm() <= (other.double() - truth).norm() * 1.01 + 1e-6 * truth.norm()


def test_gates_that_forget_everything_have_a_gradient(kernel: ModuleType) -> None:
    """Transformers' formula has none from where ``exp`` overflows, which it computes there and leaves."""
    x = torch.tensor([-200.0, 19.0, 21.0, 88.0, 200.0]).view(1, 1, 1, 5).npu().requires_grad_()
    bias, a_log = torch.zeros(1, 5).npu(), torch.zeros(1, 1).npu()
    y = kernel.layers.forget_gate.forget_gate(x, bias, a_log)
    (grad,) = torch.autograd.grad(y.sum(), x)
    truth = x.detach().cpu().double()
    torch.testing.assert_close(y.detach().cpu().double(), -F.softplus(truth), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(grad.cpu().double(), -truth.sigmoid(), rtol=1e-6, atol=1e-30)


def drawn(dtype: torch.dtype, length: int = 6, width: int = 16) -> list[Tensor]:
    torch.manual_seed(2)
    sizes = ((1, length, 3, width), (3, width), (3, 1))
    return [torch.randn(size).to(dtype).npu().requires_grad_() for size in sizes]


def formula(x: Tensor, bias: Tensor, a_log: Tensor) -> Tensor:
    return -a_log.exp() * F.softplus(x + bias)


def test_derivatives_of_all_sorts_are_those_of_the_formula(kernel: ModuleType) -> None:
    """Second ones, those of torch.func and forward ones, in float32: 1e-5 for sums of dozens of terms."""
    function, leaves = kernel.layers.forget_gate.forget_gate, drawn(torch.float32)

    def second(function, leaves) -> list[Tensor]:
        first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    def transformed(function, leaves) -> list[Tensor]:
        x, *others = (leaf.detach() for leaf in leaves)
        two = torch.stack((x, x.sin()))
        gradient = torch.func.grad(lambda x: function(x, *others).sin().sum())
        _, tangent = torch.func.jvp(lambda x: function(x, *others), (x,), (x.cos(),))
        return [gradient(x), tangent, torch.vmap(lambda x: function(x, *others))(two), torch.vmap(gradient)(two)]

    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    for derivative in (second, transformed):
        for found, wanted in zip(derivative(function, leaves), derivative(formula, wide), strict=True):
            assert (found.cpu().double() - wanted).norm() <= 1e-5 * wanted.norm()


def test_several_gradients_at_once_are_those_of_the_formula(kernel: ModuleType) -> None:
    """In float32: 1e-5 for sums of dozens of terms."""
    leaves = drawn(torch.float32)
    y = kernel.layers.forget_gate.forget_gate(*leaves)
    both = torch.stack((y.detach().cos(), y.detach().sin()))
    found = torch.autograd.grad(y, leaves, both, is_grads_batched=True)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    wanted = torch.autograd.grad(formula(*wide), wide, both.cpu().double(), is_grads_batched=True)
    for one, expected in zip(found, wanted, strict=True):
        assert (one.cpu().double() - expected).norm() <= 1e-5 * expected.norm()


def test_it_keeps_what_it_is_given_and_what_it_gives(kernel: ModuleType) -> None:
    kept: list[Tensor] = []
    leaves = drawn(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = kernel.layers.forget_gate.forget_gate(*leaves)
    assert sum(t.numel() * t.element_size() for t in kept) == sum(t.numel() * t.element_size() for t in (*leaves, y))


def test_a_step_moves_half_of_what_the_originals_does(kernel: ModuleType) -> None:
    """Beside the products of its projections, which are the same; and launches eight times less."""

    def cost(with_kernel: bool) -> Cost:
        gate = original(torch.bfloat16, torch.bfloat16).npu()
        if with_kernel:
            gate.forward = MethodType(kernel.layers.ForgetGate.forward, gate)
        x = torch.randn(1, 500, 32, dtype=torch.bfloat16).npu().requires_grad_()
        with Cost() as found:
            gate(x).sum().backward()
        return found

    ours, own = cost(True), cost(False)
    products = sum(n for name, n in ours.bytes.items() if "matmul" in name)
    assert ours.bytes.total() - products < (own.bytes.total() - products) / 2
    assert ours.launches.total() <= own.launches.total() - 8


def test_one_that_bounds_its_gates_is_left_alone(registered) -> None:
    bounded, free = (Glm5NextTextForgetGate(Glm5NextTextConfig(**SIZES, linear_lower_bound=b)) for b in (-5.0, None))
    known = original(torch.float32, torch.float32).state_dict()
    free.load_state_dict({name: known[name].view_as(empty) for name, empty in free.state_dict().items()})
    model = torch.nn.ModuleDict({"bounded": bounded, "free": free}).npu()
    rows = {row.path: row for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(model))}
    assert (rows["bounded"].swapped, rows["bounded"].reason) == (False, "it bounds its gates by -5.0")
    assert (rows["free"].swapped, rows["free"].kernel) == (True, "ForgetGate")
    x = torch.randn(1, 4, 32)
    wanted = type(free).forward(free.cpu(), x)
    torch.testing.assert_close(free.npu()(x.npu()).cpu(), wanted, rtol=1e-5, atol=1e-6)
