"""What torch promises of any differentiable function, kept by the functions of the kernels.

Derivatives are compared with those that torch computes of the formula in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from tests.support.differentiated import CASES, Case

# float32: sums of up to a few hundred terms in up to a dozen steps, relative to the norm of a derivative;
# bfloat16 rounds to 2^-9, some ten times on the way to a second derivative
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
Derivative = Callable[..., Sequence[Tensor]]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        # where nothing depends on an input, a derivative is zero
        assert (a.detach().cpu().double() - b.detach()).norm() <= tolerance * max(b.norm().item(), 1e-3)


def on_both(case: Case, derivative: Derivative, dtype: torch.dtype = torch.float32) -> None:
    """Compare a derivative of ours on the NPU with that of the formula, of the same values in float64."""
    inputs = case.inputs(dtype)
    found = derivative(case.ours, *[x.to("npu") for x in inputs])
    assert_same(found, derivative(case.formula, *[x.double() for x in inputs]), TOLERANCE[dtype])


def loss(y: Tensor) -> Tensor:
    """A scalar with derivatives of every order, different in every element."""
    weights = torch.arange(1.0, y.numel() + 1, device=y.device).view_as(y) / y.numel()
    return (y * weights.to(y.dtype)).sin().sum()


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    trained = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(function(*trained)), trained)


def second(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Differentiate the squared norm of the gradient."""
    trained = [x.detach().requires_grad_() for x in inputs]
    first = torch.autograd.grad(loss(function(*trained)), trained, create_graph=True)
    return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), trained)


def second_with_more(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Differentiate a loss that has a gradient penalty beside something else, so that a missing part is no error."""
    trained = [x.detach().requires_grad_() for x in inputs]
    value = loss(function(*trained))
    penalty = sum(g.square().sum() for g in torch.autograd.grad(value, trained, create_graph=True))
    return torch.autograd.grad(value + penalty + sum(x.square().sum() for x in trained), trained)


def third(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    x = inputs[0].detach().requires_grad_()
    first = torch.autograd.grad(loss(function(x, *inputs[1:])), x, create_graph=True)[0]
    again = torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]
    return torch.autograd.grad(again.square().sum(), x)


def hvp(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    found = torch.autograd.functional.hvp(lambda *xs: loss(function(*xs)), inputs, tuple(x.cos() for x in inputs))
    return found[1]


@each_case
@pytest.mark.parametrize("derivative", [second, second_with_more, third, hvp], ids=lambda d: d.__name__)
def test_derivatives_of_derivatives_are_those_of_the_formula(case: Case, derivative: Derivative) -> None:
    on_both(case, derivative)


@each_case
def test_second_derivatives_in_bfloat16_are_those_of_the_formula(case: Case) -> None:
    on_both(case, second, torch.bfloat16)


def transformed(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Differentiate by torch.func: once, twice, and forward."""
    numbers = tuple(range(len(inputs)))

    def scalar(*xs: Tensor) -> Tensor:
        return loss(function(*xs))

    def norm_of_gradient(*xs: Tensor) -> Tensor:
        return sum(g.square().sum() for g in grad(scalar, numbers)(*xs))

    tangents = tuple(x.cos() for x in inputs)
    return [
        *grad(scalar, numbers)(*inputs),
        *grad(norm_of_gradient, numbers)(*inputs),
        *jvp(function, inputs, tangents),
        *jvp(grad(scalar, numbers), inputs, tangents)[1],
    ]


@each_case
def test_torch_func_gives_the_derivatives_of_the_formula(case: Case) -> None:
    on_both(case, transformed)


def for_each_sample(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Give values and gradients for two samples, and for two sets of all that is not the first input."""
    two = torch.stack((inputs[0], inputs[0].sin()))
    others = [torch.stack((x, x.sin())) for x in inputs[1:]]
    numbers = tuple(range(len(inputs)))
    rest = (None,) * len(others)
    found = [vmap(function, (0, *rest))(two, *inputs[1:])]
    found += vmap(grad(lambda *xs: loss(function(*xs)), numbers), (0, *rest))(two, *inputs[1:])
    if others:
        found.append(vmap(function, (None, *[0] * len(others)))(inputs[0], *others))
    return found


@each_case
def test_vmap_gives_every_sample_its_own(case: Case) -> None:
    on_both(case, for_each_sample)


def jacobian(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor]:
    return (jacrev(lambda x: function(x, *inputs[1:]).flatten()[:8])(inputs[0]),)


def along(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor]:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, x.cos()) for x in inputs]
        return (forward_ad.unpack_dual(function(*duals)).tangent,)


@each_case
@pytest.mark.parametrize("derivative", [jacobian, along], ids=lambda d: d.__name__)
def test_jacobians_and_forward_derivatives_are_those_of_the_formula(case: Case, derivative: Derivative) -> None:
    on_both(case, derivative)


@each_case
def test_what_is_differentiated_in_an_unusual_way_is_the_same(case: Case) -> None:
    """Saved on the CPU, checked for what is not a number, checkpointed, twice, and for some inputs only."""
    inputs = [x.to("npu") for x in case.inputs()]
    expected = gradients(case.ours, *inputs)

    def same(found: Sequence[Tensor], wanted: Sequence[Tensor] = expected) -> None:
        assert_same(found, [w.cpu().double() for w in wanted], 1e-6)  # sums in another order at most

    with save_on_cpu():
        same(gradients(case.ours, *inputs))
    with torch.autograd.detect_anomaly(check_nan=True):
        same(gradients(case.ours, *inputs))
    same(gradients(lambda *xs: checkpoint(case.ours, *xs, use_reentrant=False), *inputs))
    trained = [x.detach().requires_grad_() for x in inputs]
    value = loss(checkpoint(case.ours, *trained, use_reentrant=True))
    value.backward()
    same([x.grad for x in trained])
    value = loss(case.ours(*trained))
    same(torch.autograd.grad(value, trained, retain_graph=True))
    same(torch.autograd.grad(value, trained, retain_graph=True))
    for x, wanted in zip(trained, expected):
        same(torch.autograd.grad(value, x, retain_graph=True), [wanted])
    for number, wanted in enumerate(expected):  # the others are frozen
        frozen = [x.detach().requires_grad_(i == number) for i, x in enumerate(inputs)]
        same(torch.autograd.grad(loss(case.ours(*frozen)), frozen[number]), [wanted])


def reads(case: Case, number: int) -> bool:
    """Tell by the formula whether the gradients of the others depend on an input: then the backward needs it."""
    inputs = [x.double().requires_grad_() for x in case.inputs()]
    first = torch.autograd.grad(case.formula(*inputs).sum(), inputs, create_graph=True)
    return any(
        g.requires_grad and torch.autograd.grad(g.square().sum(), inputs[number], allow_unused=True)[0] is not None
        for g in first
    )


@each_case
def test_what_a_backward_needs_may_not_change_before_it(case: Case) -> None:
    for number in range(len(case.shapes)):
        if not reads(case, number):
            continue
        inputs = [x.to("npu").requires_grad_() for x in case.inputs()]
        expected = torch.autograd.grad(case.ours(*inputs).sum(), inputs)
        y = case.ours(*inputs)
        with torch.no_grad():
            inputs[number].mul_(2)
        try:
            found = torch.autograd.grad(y.sum(), inputs)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:  # what was kept is a copy
            assert_same(found, expected, TOLERANCE[torch.float32])
