"""The delta rules under torch.compile, torch.func, checkpointing, fake tensors, and second derivatives."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels_ext_npu.selftest.functions.linear_attention import delta_rule
from tests.support.delta_rule_inputs import draw

FUNCTIONS = {False: "chunk_gated_delta_rule", True: "chunk_kda"}
BOTH = pytest.mark.parametrize("by_channel", [False, True], ids=["scalar gates", "channel gates"])
OPTIONS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


def given(by_channel: bool, length: int = 70) -> list[Tensor]:
    return [x.npu().requires_grad_() for x in draw(1, (1, length, 1, 2, 8, 8), by_channel)]


@pytest.mark.parametrize(("by_channel", "packed"), [(False, True), (True, False)])
def test_compiled_it_is_one_graph_that_gives_the_same(kernel: ModuleType, by_channel: bool, packed: bool) -> None:
    """The same operators but for where states are written: to a rounding or two."""
    torch.compiler.reset()
    function = getattr(kernel, FUNCTIONS[by_channel])
    options = {"cu_seqlens": torch.tensor([0, 30, 70], device="npu")} if packed else {}

    def call(*tensors: Tensor) -> Tensor:
        out, state = function(*tensors, **options, **OPTIONS)
        return out.sum() + state.sum()

    one, other = given(by_channel), given(by_channel)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*one)
    expected = call(*other)
    torch.testing.assert_close(found, expected)
    for ours, wanted in zip(torch.autograd.grad(found, one), torch.autograd.grad(expected, other)):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@BOTH
def test_torch_func_has_gradients_of_it_and_gradients_of_those(kernel: ModuleType, by_channel: bool) -> None:
    """Against float64, of which the first derivative is as near as without torch.func; the second has sums of those."""
    function = getattr(kernel, FUNCTIONS[by_channel])
    q, *rest = (x.detach() for x in given(by_channel, 5))

    def norm(q: Tensor) -> Tensor:
        return (
            torch.func.grad(lambda q: function(q, *rest, use_qk_l2norm_in_kernel=True)[0].square().sum())(q)
            .square()
            .sum()
        )

    def exact(q: Tensor) -> Tensor:
        others = [x.cpu().double() for x in rest]
        return torch.func.grad(lambda q: delta_rule(q, *others)[0].square().sum())(q).square().sum()

    found, wanted = torch.func.grad(norm)(q), torch.func.grad(exact)(q.cpu().double())
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@BOTH
def test_torch_func_maps_it_over_batches(kernel: ModuleType, by_channel: bool) -> None:
    function = getattr(kernel, FUNCTIONS[by_channel])
    tensors = [x.detach() for x in given(by_channel)]
    many = [torch.stack([x, 0.5 * x]) for x in tensors]
    found = torch.func.vmap(lambda *x: function(*x)[0])(*many)
    for row, out in enumerate(found):
        torch.testing.assert_close(out, function(*(x[row] for x in many))[0], rtol=1e-5, atol=1e-5)


@BOTH
def test_a_second_derivative_is_refused(kernel: ModuleType, by_channel: bool) -> None:
    tensors = given(by_channel, 5)
    out, _ = getattr(kernel, FUNCTIONS[by_channel])(*tensors)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@BOTH
def test_what_is_not_asked_for_is_not_kept(kernel: ModuleType, by_channel: bool) -> None:
    """Of the arguments alone: gradients of some, and none of the others."""
    tensors = given(by_channel)
    for number in (0, 3):
        some = [x.detach().requires_grad_(n == number) for n, x in enumerate(tensors)]
        out, state = getattr(kernel, FUNCTIONS[by_channel])(*some, output_final_state=True)
        (out.sum() + state.sum()).backward()
        assert [x.grad is not None for x in some] == [n == number for n in range(5)]
