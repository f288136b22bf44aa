"""What torch promises of any differentiable function, kept by the functions of the kernels.

Derivatives are compared with those that torch computes of the formula in float64 on the CPU.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import vhp
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

import kernels_ext_npu
from kernels_ext_npu.selftest.layers.moe_blocks_v4 import Qwen3MoeSparseMoeBlock
from tests.all_kernels.differentiated import CASES, Case
from tests.fused_moe import list_blocks
from tests.fused_moe.expert_modules import block as block_of
from tests.support import zoo
from tests.support.local_kernels import kernel
from tests.support.nearness import assert_gradients_near

# float32: sums of up to a few hundred terms in up to a dozen steps, relative to the norm of a derivative;
# bfloat16 rounds to 2^-9, up to sixteen times on the way to a second derivative
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
FUNCTIONS = {name: case for name, case in CASES.items() if not case.is_node}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_function = pytest.mark.parametrize("case", FUNCTIONS.values(), ids=FUNCTIONS)
# torch_npu gives zeros for the tangent of a gradient of any product, `x @ w` too: backward and then forward
PRODUCT_CASES = [CASES[name] for name in ("attention", "float32_logits", "hyper_connection, one token")]
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


@each_case
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_second_derivatives_are_those_of_the_formula(case: Case, dtype: torch.dtype) -> None:
    on_both(case, second, dtype)


class Unused(torch.autograd.Function):
    """Gives what it gets, and no gradient of it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.cat([x.flatten() for x in inputs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


@each_case
@pytest.mark.parametrize("create_graph", [False, True])
def test_where_no_gradient_arrives_none_leaves(case: Case, create_graph: bool) -> None:
    inputs, options = [x.to("npu").requires_grad_() for x in case.inputs()], {"allow_unused": True}
    unused = Unused.apply(case.ours(*inputs)).sum()
    found = torch.autograd.grad(unused, inputs, create_graph=create_graph, **options)
    first = torch.autograd.grad(loss(case.ours(*inputs)), inputs, create_graph=True)
    found += torch.autograd.grad(Unused.apply(*first).sum(), inputs, **options)
    assert not any(gradient.any() for gradient in found if gradient is not None)


def transformed(function: Callable[..., Tensor], *inputs: Tensor, is_twice: bool = True) -> list[Tensor]:
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
        *(jvp(grad(scalar, numbers), inputs, tangents)[1] if is_twice else ()),
    ]


@each_function
def test_torch_func_gives_the_derivatives_of_the_formula(case: Case) -> None:
    on_both(case, partial(transformed, is_twice=case not in PRODUCT_CASES))


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


def two_at_once(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Go backward once for two gradients of the result."""
    trained = [x.detach().requires_grad_() for x in inputs]
    y = function(*trained)
    both = torch.stack((y.detach().cos(), y.detach().sin()))
    return torch.autograd.grad(y, trained, both, is_grads_batched=True)


@each_case
def test_a_backward_of_several_gradients_is_that_of_each(case: Case) -> None:
    on_both(case, two_at_once)


@each_function
def test_vmap_gives_every_sample_its_own(case: Case) -> None:
    on_both(case, for_each_sample)


def kept_elsewhere(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Go backward twice, with what is kept on the CPU, and checked for what is not a number."""
    trained = [x.detach().requires_grad_() for x in inputs]
    with save_on_cpu(), torch.autograd.detect_anomaly(check_nan=True):
        value = loss(function(*trained))
        return [g for _ in range(2) for g in torch.autograd.grad(value, trained, retain_graph=True)]


@each_case
def test_what_is_kept_may_lie_elsewhere_and_is_read_twice(case: Case) -> None:
    on_both(case, kept_elsewhere)


def is_read(case: Case, number: int) -> bool:
    """Tell by the formula whether a gradient of another input depends on an input: then the backward needs it."""
    inputs = [x.double().requires_grad_() for x in case.inputs()]
    first = torch.autograd.grad(case.formula(*inputs).sum(), inputs, create_graph=True)
    return any(
        g.requires_grad
        and torch.autograd.grad(g.square().sum(), inputs[number], retain_graph=True, allow_unused=True)[0] is not None
        for g in first
    )


@each_case
def test_what_a_backward_needs_may_not_change_before_it(case: Case) -> None:
    """It says so, or what is kept is a copy or a result, and the gradients are right."""
    expected = gradients(case.formula, *[x.double() for x in case.inputs()])
    for number in filter(partial(is_read, case), range(len(case.shapes))):
        inputs = [x.to("npu").requires_grad_() for x in case.inputs()]
        value = loss(case.ours(*inputs))
        with torch.no_grad():
            inputs[number].mul_(2)
        refused = ""
        try:
            found = torch.autograd.grad(value, inputs)
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert "inplace" in refused
        else:
            assert_same(found, expected, TOLERANCE[torch.float32])


def test_a_block_with_a_list_of_experts_has_the_originals_forward_where_something_is_transformed() -> None:
    expert_lists = kernel("FusedMoE").expert_lists
    block, x = list_blocks.bound(kernel("FusedMoE"), block_of(Qwen3MoeSparseMoeBlock)), torch.zeros(2, 32)
    x = x.to("npu")
    assert expert_lists.fusable_experts(block, x, 2) is not None
    with forward_ad.dual_level():
        assert expert_lists.fusable_experts(block, x, 2) is None
    assert not vmap(lambda row: row + (expert_lists.fusable_experts(block, x, 2) is not None))(x).any()


# attention in torch: that of torch_npu looks into storages, which torch.func has none of
MODELS = ("qwen3", "qwen3_moe", "gpt_oss", "phi3")
each_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = zoo.build(name).eval()
    model.set_attn_implementation("eager")
    return model


def tokens(samples: int = 3) -> Tensor:
    return torch.randint(2, 90, (samples, 6), generator=torch.Generator().manual_seed(0))


def next_derivative(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@each_model
def test_a_whole_model_has_a_gradient_for_every_sample(registered, name: str) -> None:
    model, ids = kernels_ext_npu.kernelize(build(name).to("npu")), tokens()
    state = {n: p.detach() for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def lost(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        options = {"input_ids": ids[None], "use_cache": False}
        return next_derivative(functional_call(model, (parameters, buffers), (), options).logits, ids[None])

    found = vmap(grad(lost), (None, 0))(state, ids.to("npu"))
    original = build(name)
    for number, sample in enumerate(ids):
        original.zero_grad()
        next_derivative(original(input_ids=sample[None], use_cache=False).logits, sample[None]).backward()
        expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in original.named_parameters()}
        assert_gradients_near({n: gradient[number] for n, gradient in found.items()}, expected)


@pytest.mark.parametrize("name", [*MODELS, "glm4_moe"])
def test_a_whole_model_goes_backward_once_for_several_results(registered, name: str) -> None:
    """Of which one is its loss, computed without logits."""

    def found(model: nn.Module) -> dict[str, Tensor]:
        ids, parameters = tokens().to(model.device), dict(model.named_parameters())
        result = model(input_ids=ids, labels=ids, use_cache=False)
        both = torch.stack((result.loss, result.logits.square().mean()))
        directions = torch.eye(2, device=both.device)
        options = {"is_grads_batched": True, "materialize_grads": True, "allow_unused": True}
        return dict(zip(parameters, torch.autograd.grad(both, list(parameters.values()), directions, **options)))

    assert_gradients_near(found(kernels_ext_npu.kernelize(build(name).to("npu"))), found(build(name)))


@each_model
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_whole_model_has_second_derivatives(registered, name: str, attention: str) -> None:
    """Of a sum of logits, where what comes last has no gradient in the second pass, and of a loss by its weights."""

    def found(model: nn.Module) -> dict[str, Tensor]:
        ids = tokens().to(model.device)
        x = model.get_input_embeddings()(ids).detach()
        product = vhp(lambda x: model(inputs_embeds=x, use_cache=False).logits.sum(), x, x.cos())[1]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        weights = {name: p for name, p in model.named_parameters() if "layers.0" in name and p.dim() == 2}
        first = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
        norm = sum(gradient.square().sum() for gradient in first)
        second = torch.autograd.grad(norm, list(weights.values()), materialize_grads=True)
        return {"vhp": product / product.norm().detach(), **dict(zip(weights, second))}

    model = build(name).to("npu")
    if attention == "sdpa" and name != "gpt_oss":  # which has none
        model.set_attn_implementation(attention)
    ours, plain = found(kernels_ext_npu.kernelize(model)), found(build(name))
    assert_same(list(ours.values()), [tensor.double() for tensor in plain.values()], 1e-4)
