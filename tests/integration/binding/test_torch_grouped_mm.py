"""torch's own products by groups on the NPU, called as a function and by experts of other people's code."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import kernels_ext_npu
from tests.support import npu_counts
from tests.support.nearness import assert_near

pytestmark = pytest.mark.usefixtures("registered")
ENDS = [3, 3, 9, 14]  # of four groups, of which one is empty
# of one rounding of what is summed up in float32; float32 itself adds 48 products or less
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
NO_WAITS = {"stream_syncs": 0, "device_to_host_copies": 0}


def arguments(dtype: torch.dtype, outer: int = 48, rows: int = ENDS[-1]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows, a matrix for each group as linear layers hold theirs, and the ends of the groups."""
    torch.manual_seed(0)
    return torch.randn(rows, 32).to(dtype), torch.randn(len(ENDS), outer, 32).to(dtype), torch.tensor(ENDS).int()


def formula(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each group of rows with its matrix, as the documentation of ``torch.nn.functional.grouped_mm`` says."""
    return torch.cat([x[start:end] @ each.T for (start, end), each in zip(pairwise([0, *ENDS]), weight)])


@pytest.mark.parametrize("outer", [48, 50], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("is_transposed", [True, False], ids=["as linear layers", "as they multiply"])
def test_gives_what_float64_gives(dtype: torch.dtype, outer: int, is_transposed: bool) -> None:
    x, weight, ends = arguments(dtype, outer)
    exact = [value.double().requires_grad_() for value in (x, weight)]
    expected = formula(*exact)
    expected.backward(torch.ones_like(expected))
    held = weight if is_transposed else weight.mT.contiguous()
    ours = [value.to("npu").requires_grad_() for value in (x, held)]
    result = F.grouped_mm(ours[0], ours[1].mT if is_transposed else ours[1], offs=ends.to("npu"))
    result.backward(torch.ones_like(result))
    d_weight = ours[1].grad if is_transposed else ours[1].grad.mT
    assert result.is_contiguous()
    assert ours[1].grad.is_contiguous()
    assert_near(result, expected, ROUNDING[dtype])
    assert_near(ours[0].grad, exact[0].grad, ROUNDING[dtype])
    assert_near(d_weight, exact[1].grad, ROUNDING[dtype])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_is_one_product_and_no_host_wait(mode: type) -> None:
    x, weight, ends = (value.to("npu") for value in arguments(torch.bfloat16))
    with mode():
        npu_counts.reset()
        F.grouped_mm(x, weight.mT, offs=ends)
        # what is in a group is an end less the one before, as int64
        counted = {"npu_grouped_matmul": 1, "constant_pad_nd": 1, "sub": 1, "copy_": 1}
        assert npu_counts.read() == counted | NO_WAITS


def test_gradients_are_a_product_each() -> None:
    x, weight, ends = (value.to("npu") for value in arguments(torch.bfloat16))
    leaves = x.requires_grad_(), weight.requires_grad_()
    result = F.grouped_mm(x, weight.mT, offs=ends)
    grad = torch.ones_like(result)
    npu_counts.reset()
    torch.autograd.grad(result, leaves, grad)
    assert npu_counts.read() == {"npu_grouped_matmul": 2, **NO_WAITS}


def test_a_sum_over_groups() -> None:
    x, weight, ends = arguments(torch.bfloat16)
    right = formula(x, weight)
    npu_counts.reset()
    found = F.grouped_mm(x.to("npu").T, right.to("npu"), offs=ends.to("npu"))
    assert npu_counts.read()["npu_grouped_matmul"] == 1
    assert npu_counts.read()["device_to_host_copies"] == 0
    parts = [x[start:end].double().T @ right[start:end].double() for start, end in pairwise([0, *ENDS])]
    assert_near(found, torch.stack(parts), ROUNDING[torch.bfloat16])


def test_derivatives_again_and_by_torch_func() -> None:
    x, weight, ends = arguments(torch.float32)
    found, expected = [], []
    for results, device in ((found, "npu"), (expected, "cpu")):
        leaves = [value.to(device, torch.float32 if device == "npu" else torch.float64) for value in (x, weight)]
        offs = ends.to("npu")

        def loss(x: Tensor, weight: Tensor, offs: Tensor = offs) -> Tensor:
            product = F.grouped_mm(x, weight.mT, offs=offs) if x.device.type == "npu" else formula(x, weight)
            return product.square().sum()

        results += torch.func.grad(loss, argnums=(0, 1))(*leaves)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        results += torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
    for mine, theirs in zip(found, expected, strict=True):
        assert_near(mine, theirs, 10 * ROUNDING[torch.float32])  # products of products


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_what_is_computed_again_is_the_same(is_reentrant: bool) -> None:
    x, weight, ends = (value.to("npu") for value in arguments(torch.bfloat16))
    found = []
    for run in (lambda f, *given: f(*given), lambda f, *given: checkpoint(f, *given, use_reentrant=is_reentrant)):
        leaf = x.clone().requires_grad_()
        run(lambda x: F.grouped_mm(x, weight.mT, offs=ends), leaf).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_a_compiled_function_calls_it() -> None:
    x, weight, ends = arguments(torch.bfloat16)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    compiled = torch.compile(lambda x, weight, ends: F.grouped_mm(x, weight.mT, offs=ends), backend=backend)
    leaves = [value.to("npu").requires_grad_() for value in (x, weight)]
    npu_counts.reset()
    result = compiled(*leaves, ends.to("npu"))
    result.backward(torch.ones_like(result))
    assert npu_counts.read()["npu_grouped_matmul"] == 3
    assert npu_counts.read()["device_to_host_copies"] == 0
    assert_near(result, formula(x.double(), weight.double()), ROUNDING[torch.bfloat16])


def test_rows_behind_the_last_group_are_left_out() -> None:
    x, weight, ends = (value.to("npu") for value in arguments(torch.bfloat16, rows=20))
    leaf = weight.requires_grad_()
    result = F.grouped_mm(x, leaf.mT, offs=ends)[: ENDS[-1]]
    result.sum().backward()
    exact = weight.detach().cpu().double().requires_grad_()
    expected = formula(x.cpu().double(), exact)
    expected.sum().backward()
    assert_near(result, expected, ROUNDING[torch.bfloat16])
    assert_near(leaf.grad, exact.grad, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, ends: (x, w.mT, {"offs": ends.long()}), "int32"),
        (lambda x, w, ends: (x, w.mT, {"offs": ends[:3]}), "batch sizes"),
        (lambda x, w, ends: (x, w.mT, {}), "offsets"),
        (lambda x, w, ends: (x, w, {"offs": ends}), "contraction dimension"),
        (lambda x, w, ends: (x, w.mT, {"offs": ends, "bias": torch.ones(4, 48, device="npu")}), "Bias"),
    ],
    ids=["long", "too few", "none", "sizes", "bias"],
)
def test_wrong_calls_are_torchs_errors(change, message: str) -> None:
    left, right, options = change(*(value.to("npu") for value in arguments(torch.bfloat16)))
    with pytest.raises(RuntimeError, match=message):
        F.grouped_mm(left, right, **options)


@pytest.mark.parametrize("case", ["ends on the CPU", "no rows", "all of one size"])
def test_other_calls_are_torchs(case: str) -> None:
    x, weight, ends = arguments(torch.bfloat16)
    offs: Tensor | None = ends
    if case == "no rows":
        x, offs = x[:0], torch.zeros_like(ends)
    elif case == "all of one size":
        x, offs = x[:12].view(4, 3, 32), None
    expected = F.grouped_mm(x, weight.mT, offs=offs)
    given = offs if offs is None or case == "ends on the CPU" else offs.to("npu")
    assert_near(F.grouped_mm(x.to("npu"), weight.to("npu").mT, offs=given), expected, ROUNDING[torch.bfloat16])


class StackedExperts(nn.Module):
    """Experts of which each has its rows one after the other, as libraries for training hold them."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("w1", (4, 48, 32)), ("w3", (4, 48, 32)), ("w2", (4, 32, 48))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 8))

    def forward(self, x: Tensor, rows_per_expert: Tensor) -> Tensor:
        ends = rows_per_expert.cumsum(0, dtype=torch.int32)
        gate, up = (self.multiply(x, weight, ends) for weight in (self.w1, self.w3))
        return self.multiply(F.silu(gate) * up, self.w2, ends)

    def multiply(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def test_the_report_says_who_computes_experts_that_call_it() -> None:
    torch.manual_seed(0)
    kernels_ext_npu.register(strict=True)
    experts = StackedExperts().to("npu")
    kernels_ext_npu.kernelize(experts)
    (row,) = kernels_ext_npu.report(experts)
    assert (row.swapped, row.kind) == (True, "experts")
    assert "where it calls torch's grouped_mm, which is the kernel's until unregister()" in row.reason
    x, counts = torch.randn(14, 32, device="npu"), torch.tensor([3, 0, 6, 5], device="npu")
    npu_counts.reset()
    found = experts(x, counts)
    assert npu_counts.read()["npu_grouped_matmul"] == 3
    assert npu_counts.read()["device_to_host_copies"] == 0
    assert_near(found, StackedExperts.forward(experts.cpu(), x.cpu(), counts.cpu()), 1e-6)


@pytest.mark.parametrize("leave", [lambda: kernels_ext_npu.register(kernels=["RMSNorm"]), kernels_ext_npu.unregister])
def test_without_the_kernel_torch_loops(leave: Callable[[], None]) -> None:
    x, weight, ends = (value.to("npu") for value in arguments(torch.bfloat16))
    leave()
    assert not any(row.swapped for row in kernels_ext_npu.report(StackedExperts().to("npu")))
    npu_counts.reset()
    F.grouped_mm(x, weight.mT, offs=ends)
    assert npu_counts.read()["mm"] == len(ENDS)
