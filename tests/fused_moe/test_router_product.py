"""The product of routers that compare in float32, with no tokens cast: against float64 and transformers' formula."""

from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.measuring.costs import Cost

TOKENS, EXPERTS, SIZE = 300, 24, 64


@pytest.fixture
def product(kernel, monkeypatch):
    """The product, however few the tokens are."""
    module = import_module(f"{kernel.__name__}.routers.router_product")
    monkeypatch.setattr(module.split_bf16, "LARGE", 0)
    return module.float32_logits


def formula(x: Tensor, weight: Tensor) -> Tensor:
    """DeepseekV3TopkRouter.forward of transformers, models/deepseek_v3/modeling_deepseek_v3.py."""
    return F.linear(x.float(), weight.float())


def drawn(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, SIZE).to(dtype).npu().requires_grad_() for rows in (TOKENS, EXPERTS)]


def copies(leaves: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The same numbers as leaves of their own, on the CPU where they are float64."""
    moved = [leaf.detach().cpu() if dtype is torch.float64 else leaf.detach() for leaf in leaves]
    return [leaf.to(dtype or leaf.dtype, copy=True).requires_grad_() for leaf in moved]


def test_gradients_are_no_further_from_float64_than_transformers_and_no_tokens_are_cast(product) -> None:
    ours = drawn()
    theirs, true = copies(ours), copies(ours, torch.float64)
    grad = (torch.randn(TOKENS, EXPERTS) * torch.logspace(-6, 6, EXPERTS)).npu()
    with Cost() as cost:
        logits = product(*ours)
        logits.backward(grad)
    assert cost.kernels.total() == 14  # eight of them cut the gradient into pieces
    assert cost.launches["_to_copy"] == 1  # of the gradient of the weight
    formula(*theirs).backward(grad)
    expected = true[0] @ true[1].t()
    expected.backward(grad.cpu().double())
    assert logits.dtype is torch.float32
    assert (logits.cpu() - expected).norm() <= 1e-6 * expected.norm()  # exact products, float32 sums
    for one, other, exact in zip(ours, theirs, true):
        assert one.grad.stride() == one.stride()
        far, allowed = ((leaf.grad.cpu().double() - exact.grad).norm() for leaf in (one, other))
        assert far <= 1.02 * allowed  # rounded to bfloat16 once, as theirs is, of sums that differ in their order


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(product, frozen: int) -> None:
    ours = drawn()
    theirs = copies(ours)
    for leaves, function in ((ours, product), (theirs, formula)):
        leaves[frozen].requires_grad_(False)
        function(*leaves).square().sum().backward()
    assert ours[frozen].grad is None
    found, expected = (leaves[1 - frozen].grad.float() for leaves in (ours, theirs))
    assert (found - expected).norm() <= 2**-8 * expected.norm()  # a rounding to bfloat16


def test_second_derivatives_are_those_of_the_formula(product) -> None:
    ours = drawn()
    theirs = copies(ours)
    found = []
    for leaves, function in ((ours, product), (theirs, formula)):
        (d_x,) = torch.autograd.grad(function(*leaves).sigmoid().sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad(d_x.float().square().sum(), leaves))
    for one, other in zip(*found):
        assert (one.float() - other.float()).norm() <= 2**-8 * other.float().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_the_formula(product, dtype: torch.dtype) -> None:
    ours = drawn(dtype)
    theirs = copies(ours)
    for leaves, function in ((ours, product), (theirs, formula)):
        function(*leaves).square().sum().backward()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, theirs))


def test_few_tokens_are_cast(kernel) -> None:
    x, weight = drawn()
    with Cost() as cost:
        import_module(f"{kernel.__name__}.routers.router_product").float32_logits(x, weight)
    assert cost.launches["_to_copy"] == 2


def test_what_is_kept_is_what_was_given(product) -> None:
    kept: list[Tensor] = []
    x, weight = drawn()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        product(x, weight)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}
