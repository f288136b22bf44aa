"""What all recurrences promise beside their values: launches, waits, budgets, derivatives, autocast."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels_ext_npu.selftest.functions.linear_attention import delta_rule
from tests.linear_attention import test_linear_recurrence, test_selective_scan
from tests.linear_attention.delta_rule_inputs import draw
from tests.linear_attention.test_linear_recurrence import results
from tests.support import npu_counts

DELTA_RULE = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
SCAN = {"delta_softplus": True, "return_last_state": True}
ROUNDINGS = 100 * 2.0**-24  # relative to the norm


class Recurrence(NamedTuple):
    """Hold a function of the kernel and how it is called, its arguments of a length, and a recurrence in torch."""

    name: str
    options: dict[str, bool]
    drawn: Callable[[int], list[Tensor]]
    truth: Callable[..., tuple[Tensor, Tensor]]
    chunk: int = 64

    def call(self, kernel: ModuleType, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Call it: results, and the state behind them."""
        return getattr(kernel, self.name)(*tensors, **self.options)

    def leaves(self, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [x.to(dtype).npu().requires_grad_() for x in self.drawn(length)]


def delta_rule_case(name: str, by_channel: bool) -> Recurrence:
    return Recurrence(name, DELTA_RULE, lambda length: draw(1, (1, length, 1, 2, 8, 8), by_channel), delta_rule)


CHUNKED = {
    "gdn": delta_rule_case("chunk_gated_delta_rule", False),
    "kda": delta_rule_case("chunk_kda", True),
    "scan": Recurrence(
        "selective_scan_fn",
        SCAN,
        lambda length: list(test_selective_scan.draw(4, 1, length).values()),
        test_selective_scan.truth,
        32,
    ),
    "channels": Recurrence(
        "linear_recurrence",
        {},
        lambda length: test_linear_recurrence.draw(1, 1, length),
        test_linear_recurrence.truth,
        32,
    ),
}
STEPS = {
    "a step of gdn": delta_rule_case("fused_recurrent_gated_delta_rule", False),
    "a step of kda": delta_rule_case("fused_recurrent_kda", True),
}
each_recurrence = pytest.mark.parametrize("name", CHUNKED)


@each_recurrence
def test_a_chunk_more_is_a_product_and_a_sum_more_in_each_direction_and_nothing_waits(
    kernel: ModuleType, name: str
) -> None:
    """Nor is anything left to the host or the scalar cores; recurrences without keys have one of both."""
    case, launches, more = CHUNKED[name], {}, 2 if name in ("gdn", "kda") else 1
    for chunks in (2, 5):
        leaves = case.leaves(case.chunk * chunks)
        npu_counts.reset()
        out, _ = case.call(kernel, *leaves)
        forward = sum(npu_counts.read().values())
        out.backward(torch.ones_like(out))
        calls = npu_counts.read()
        assert calls["stream_syncs"] == calls["device_to_host_copies"] == 0
        assert not {"linalg_solve_triangular", "triangular_solve", "linalg_inv_ex"} & calls.keys()
        launches[chunks] = forward, sum(calls.values())
    assert launches[5][0] - launches[2][0] == more * 3
    assert launches[5][1] - launches[2][1] == more * 6


@pytest.mark.parametrize("name", ["gdn", "kda", "scan"])
def test_segments_of_a_smaller_budget_give_the_same(kernel: ModuleType, monkeypatch, name: str) -> None:
    case, found = CHUNKED[name], []
    module = import_module(f"{kernel.__name__}.{'ssm.selective_scan' if name == 'scan' else 'delta_rule.autograd'}")
    for budget in (module.BUDGET, 1):
        monkeypatch.setattr(module, "BUDGET", budget)
        leaves = case.leaves(200)
        found.append(results(case.call(kernel, *leaves), leaves))
    # the host takes ``exp`` of what is left over of a tensor in another way than of the rest
    allowed = ROUNDINGS if name == "scan" else 0
    for at_once, by_parts in zip(*found):
        assert (by_parts - at_once).norm() <= allowed * at_once.norm()


@each_recurrence
def test_torch_func_has_gradients_of_gradients_and_autograd_refuses_them(kernel: ModuleType, name: str) -> None:
    """Against float64; a second derivative has sums of first ones."""
    case = CHUNKED[name]
    leaves = case.leaves(35)
    first, *others = (leaf.detach() for leaf in leaves)

    def norm(function: Callable, first: Tensor, *others: Tensor) -> Tensor:
        grad = torch.func.grad(lambda x: function(x, *others)[0].square().sum())(first)
        return grad.square().sum()

    found = torch.func.grad(lambda x: norm(lambda *given: case.call(kernel, *given), x, *others))(first)
    exact = [x.cpu().double() for x in others]
    wanted = torch.func.grad(lambda x: norm(case.truth, x, *exact))(first.cpu().double())
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    out, _ = case.call(kernel, *leaves)
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"has no derivative; .*\.restore\(module\)"):
        torch.autograd.grad(grad.sum(), leaves)


@each_recurrence
def test_torch_func_maps_it_over_batches(kernel: ModuleType, name: str) -> None:
    case = CHUNKED[name]
    many = [torch.stack([x, 0.5 * x]).npu() for x in case.drawn(70)]
    found = torch.func.vmap(lambda *x: case.call(kernel, *x)[0])(*many)
    for row, out in enumerate(found):
        torch.testing.assert_close(out, case.call(kernel, *(x[row] for x in many))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CHUNKED | STEPS)
def test_autocast_rounds_nothing(kernel: ModuleType, name: str) -> None:
    """A Trainer with bf16=True runs a model so: the forward in it, the backward not."""
    case, found = (CHUNKED | STEPS)[name], []
    for is_cast in (False, True):
        leaves = case.leaves(1 if name in STEPS else 40, torch.bfloat16)
        with torch.autocast("npu", torch.bfloat16, enabled=is_cast):
            both = case.call(kernel, *leaves)
        found.append(results(both, leaves))
    assert all(map(torch.equal, *found))
