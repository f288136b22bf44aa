"""torch's own rms_norm on the NPU, called as a function or as a module that nobody swapped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import hessian, jvp, vmap
from torch.fx import GraphModule

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from tests.conftest import ROOT
from tests.support import npu_counts
from tests.support.nearness import assert_near

pytestmark = pytest.mark.usefixtures("registered")
# of one rounding of the result, relative to its norm; gradients of float32 add as many values as there are
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
NO_WAITS = {"stream_syncs": 0, "device_to_host_copies": 0}
SHAPES = [
    ((5, 40), (40,)),
    ((40,), (40,)),
    ((2, 3, 8, 6), (8, 6)),
    ((2, 1, 2, 1, 2, 1, 2, 3, 12), (12,)),
    ((1, 7, 1), (1,)),
]


def arguments(shape: tuple[int, ...], normed: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw an input, a weight and the gradient of the result."""
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype), torch.randn(normed).to(dtype), torch.randn(shape).to(dtype)


def formula(x: Tensor, normed: tuple[int, ...], weight: Tensor | None = None, *, eps: float) -> Tensor:
    """torch.nn.RMSNorm's documentation, in float64."""
    dims = tuple(range(-len(normed), 0))
    x = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def gradients(tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients of tensors, all of which have one."""
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("shape", "normed"), SHAPES)
def test_gives_what_float64_gives(shape: tuple[int, ...], normed: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, grad = arguments(shape, normed, dtype)
    for inputs in ([x, weight], [x]):
        exact = [value.double().requires_grad_() for value in inputs]
        expected = formula(exact[0], normed, *exact[1:], eps=1e-5)
        expected.backward(grad.double())
        ours = [value.to("npu").requires_grad_() for value in inputs]
        result = F.rms_norm(ours[0], normed, *ours[1:], eps=1e-5)
        result.backward(grad.to("npu"))
        assert result.is_contiguous()
        assert_near(result, expected, ROUNDING[dtype])
        for mine, theirs in zip(gradients(ours), gradients(exact), strict=True):
            assert mine.dtype == dtype
            # normed over one value the gradient is all but zero: what is left is the rounding of what cancels
            size = max(theirs.norm(), grad.double().norm())
            assert (mine.cpu().double() - theirs).norm() <= 2 * ROUNDING[dtype] * size


@pytest.mark.parametrize(("shape", "normed"), SHAPES)
def test_is_one_launch_each_way(shape: tuple[int, ...], normed: tuple[int, ...]) -> None:
    x, weight, grad = (value.to("npu").requires_grad_() for value in arguments(shape, normed, torch.float32))
    npu_counts.reset()
    result = F.rms_norm(x, normed, weight)
    assert npu_counts.read() == {"npu_rms_norm": 1, **NO_WAITS}
    npu_counts.reset()
    torch.autograd.grad(result, (x, weight), grad)
    assert npu_counts.read() == {"npu_rms_norm_backward": 1, **NO_WAITS}


def test_without_an_eps_it_takes_torchs() -> None:
    x = torch.full((2, 4), 1e-4, dtype=torch.bfloat16)
    assert_near(F.rms_norm(x.to("npu"), (4,)), F.rms_norm(x, (4,)), ROUNDING[torch.bfloat16])


def test_strided_rows_and_gradients_of_a_sum() -> None:
    x, weight, _ = arguments((6, 5, 32), (32,), torch.float32)
    results = []
    for device in ("cpu", "npu"):
        mine = x.to(device).transpose(0, 1).requires_grad_()
        results.append(torch.autograd.grad(F.rms_norm(mine, (32,), weight.to(device), 1e-6).sum(), mine)[0])
    assert_near(results[1], results[0], ROUNDING[torch.float32])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_nothing_is_normed_as_torch_does(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape, device="npu", requires_grad=True), torch.ones(8, device="npu", requires_grad=True)
    result = F.rms_norm(x, (8,), weight)
    result.sum().backward()
    assert result.shape == shape
    assert [list(grad.shape) for grad in gradients([x, weight])] == [list(shape), [8]]
    assert not gradients([weight])[0].any()


def test_float64_is_torchs_own_formula() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device="npu", requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, device="npu", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: F.rms_norm(x, (4,), weight, 1e-3), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, weight: F.rms_norm(x, (4,), weight, 1e-3), (x, weight))


def test_the_gradient_can_be_differentiated() -> None:
    x, weight, grad = arguments((4, 16), (16,), torch.float32)
    seconds = []
    for device in ("cpu", "npu"):
        mine = x.to(device).requires_grad_()
        y = F.rms_norm(mine, (16,), weight.to(device), 1e-6)
        (first,) = torch.autograd.grad(y, mine, grad.to(device), create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), mine)[0])
    assert_near(seconds[1], seconds[0], 1e-5)  # float32, of terms that cancel


@pytest.mark.parametrize(
    "transform",
    [
        lambda norm, x, w: jvp(norm, (x, w), (w.expand_as(x), w))[1],
        lambda norm, x, w: vmap(norm, (0, None))(x, w),
        lambda norm, x, w: hessian(lambda x: norm(x, w).square().sum())(x[:2]),
        lambda norm, x, w: torch.autograd.grad(norm(x, w), x, x.detach().expand(3, *x.shape), is_grads_batched=True)[0],
    ],
    ids=["jvp", "vmap", "hessian", "batched gradients"],
)
def test_transforms_of_torch_func(transform: Callable[..., Tensor]) -> None:
    x, weight, _ = arguments((4, 16), (16,), torch.float32)
    found, expected = (
        transform(lambda x, w: F.rms_norm(x, (16,), w, 1e-6), x.to(device).requires_grad_(), weight.to(device))
        for device in ("npu", "cpu")
    )
    assert_near(found, expected, 1e-5)  # float32, of terms that cancel


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_has_the_operator_of_torch_npu(dynamic: bool) -> None:
    """Which backends for NPUs know."""
    called: list[str] = []

    def keep(graph: GraphModule, _: object) -> Callable:
        called.extend(str(node.target) for node in graph.graph.nodes if "norm" in str(node.target))
        return make_boxed_func(graph)

    norm = torch.compile(
        lambda x, w: F.rms_norm(x, (16,), w, 1e-6) * 2, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic
    )
    for rows in (4, 7):
        x, weight, grad = arguments((rows, 16), (16,), torch.float32)
        mine, theirs = x.to("npu").requires_grad_(), x.clone().requires_grad_()
        norm(mine, weight.to("npu")).backward(grad.to("npu"))
        (F.rms_norm(theirs, (16,), weight, 1e-6) * 2).backward(grad)
        assert_near(gradients([mine])[0], gradients([theirs])[0])
    assert set(called) == {"npu.npu_rms_norm.default", "npu.npu_rms_norm_backward.default"}
    assert len(called) == (2 if dynamic else 4)


def test_a_result_can_be_changed_in_place() -> None:
    x, weight, grad = arguments((5, 16), (16,), torch.float32)
    changed = []
    for device in ("npu", "cpu"):
        mine = x.to(device).requires_grad_()
        F.rms_norm(mine, (16,), weight.to(device), 1e-6).add_(1).mul_(grad.to(device)).sum().backward()
        changed += gradients([mine])
    assert_near(*changed)


def test_a_graph_outlives_the_registration() -> None:
    x = torch.randn(4, 8, device="npu", requires_grad=True)
    result = F.rms_norm(x, (8,))
    kernels_ext_npu.unregister()
    npu_counts.reset()
    result.sum().backward()
    assert npu_counts.read()["npu_rms_norm_backward"] == 1
    npu_counts.reset()
    F.rms_norm(x, (8,))
    assert "npu_rms_norm" not in npu_counts.read()


def test_a_kernel_that_was_loaded_from_elsewhere_before_is_taken(tmp_path: Path) -> None:
    """Its modules are there already, and are not imported again into its package."""
    F.rms_norm(torch.randn(4, 8, device="npu"), (8,))
    for name in REPOSITORIES:
        (tmp_path / name).symlink_to(ROOT / name)
    kernels_ext_npu.register(source=tmp_path)
    npu_counts.reset()
    F.rms_norm(torch.randn(4, 8, device="npu"), (8,))
    assert npu_counts.read()["npu_rms_norm"] == 1


def test_is_left_alone_without_the_kernel_of_norms() -> None:
    kernels_ext_npu.register(kernels=["RoPE"])
    npu_counts.reset()
    nn.RMSNorm(8, device="npu")(torch.randn(4, 8, device="npu"))
    assert "npu_rms_norm" not in npu_counts.read()
