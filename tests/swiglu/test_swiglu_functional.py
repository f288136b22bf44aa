"""swiglu, geglu and clipped_swiglu: values, gradients, launches, limits."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.selftest.functions.norms import gated, gelu_tanh
from tests.support.rounding import launched

UNITS = {"swiglu": gated(F.silu), "geglu": gated(gelu_tanh)}
FUSED = {"swiglu": "npu_swiglu", "geglu": "npu_geglu"}


def gate_up(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(2).to(dtype)


def gpt_oss(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """transformers' own."""
    module = type("Module", (), {"alpha": alpha, "limit": limit})
    return GptOssExperts._apply_gate(module, x)


@pytest.mark.parametrize("shape", [(64,), (3, 32), (2, 5, 96), (5, 123, 246), (1, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", UNITS)
def test_one_launch_as_exact_as_the_dtype_allows(kernel: ModuleType, name, dtype, shape) -> None:
    """float32 to 1e-6 of the largest; half precision to two roundings, which GeGLU has in float16."""
    x = gate_up(*shape, dtype=dtype)
    moved = x.npu()
    assert launched(lambda: getattr(kernel, name)(moved)) == {FUSED[name]: 1}
    y = getattr(kernel, name)(moved)
    assert y.dtype == dtype
    expected = UNITS[name](x.double())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    error = (y.cpu().double() - expected).abs()
    assert (error <= 2 * tolerance * expected.abs() + 1e-6).all()


def test_training_keeps_the_joined_tensor_and_nothing_else(kernel: ModuleType) -> None:
    saved = []
    x = gate_up(4, 64).npu().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        kernel.swiglu(x)
    assert saved == [x.data_ptr()]


def test_without_gradient_two_tensors_are_not_joined(kernel: ModuleType) -> None:
    gate, up = (half.contiguous() for half in gate_up(4, 64).npu().chunk(2, -1))
    assert launched(lambda: kernel.swiglu(gate, up)) == {"silu": 1, "mul": 1}


def test_gate_and_up_of_two_dtypes_give_what_torch_gives(kernel: ModuleType) -> None:
    gate, up = gate_up(3, 32).npu(), gate_up(3, 32, dtype=torch.bfloat16).npu().requires_grad_()
    y = kernel.swiglu(gate, up)
    assert y.dtype == torch.float32
    assert torch.allclose(y, F.silu(gate) * up, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("size", "alpha", "is_launched"),
    [(32, 1.702, True), (32, 0.5, True), (7, 1.702, False), (32, 0.0, False), (32, -1.0, False)],
)
def test_clipped_swiglu_is_that_of_gpt_oss(kernel, npu_counters, size, alpha, is_launched, interleaved) -> None:
    """Value and gradient, on both sides of the limits; float32 to 1e-6. In torch where its gradient has no operator."""
    x = gate_up(6, 2 * size) * 3
    assert (x > 2).any()
    assert (x < -2).any()
    exact = x.double().requires_grad_()
    woven = exact if interleaved else torch.stack(exact.chunk(2, -1), -1).flatten(-2)
    expected = gpt_oss(woven, alpha, 2.0)
    leaf = x.npu().requires_grad_()
    y = kernel.clipped_swiglu(leaf, alpha, 2.0, interleaved)
    assert npu_counters().get("npu_clipped_swiglu", 0) == is_launched
    y.square().sum().backward()
    expected.square().sum().backward()
    assert (y.detach().cpu() - expected.detach()).norm() <= 1e-6 * expected.norm()
    assert (leaf.grad.cpu() - exact.grad).norm() <= 1e-6 * exact.grad.norm()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_of_clipped_swiglu_is_no_further_from_float64_than_torch(
    kernel: ModuleType, dtype, interleaved
) -> None:
    """With values at the limit, which have one, and far below it."""
    limit = float(torch.tensor(2.3, dtype=dtype))
    x = gate_up(64, 256, dtype=dtype) * 2
    x[:, ::7] = limit
    x[:, 1::9] = -limit
    x[::5, ::8] = -6e4  # times alpha more than float16 holds
    grad = gate_up(64, 128, dtype=dtype)
    results = []
    for of in (torch.double, dtype):
        leaf = x.clone().to(of).requires_grad_()
        woven = leaf if interleaved else torch.stack(leaf.chunk(2, -1), -1).flatten(-2)
        gpt_oss(woven, limit=limit).backward(grad.to(of))
        results.append(leaf.grad.double())
    exact, own = results
    leaf = x.npu().requires_grad_()
    kernel.clipped_swiglu(leaf, limit=limit, interleaved=interleaved).backward(grad.npu())
    found = leaf.grad.cpu().double()
    large = x.abs() >= limit  # the others' may be too small for the dtype
    assert torch.equal(found[large] == 0, exact[large].to(dtype) == 0)
    assert (found - exact).norm() <= (own.nan_to_num() - exact).norm() * (1 + 1e-6) + 1e-6 * exact.norm()


@pytest.mark.parametrize(("name", "most", "launches"), [("clipped_swiglu", 29, 9), ("clamped_swiglu", 27, 5)])
def test_gradients_of_what_is_clipped_read_and_write_little(kernel: ModuleType, name, most, launches) -> None:
    """Bytes in tensors of half the size of the argument; read and written once they would be 5.

    Of the one whose halves lie side by side 8 are copies of halves, before and behind operators.
    """
    x, grad = gate_up(64, 256, dtype=torch.bfloat16).npu().requires_grad_(), gate_up(64, 128).bfloat16().npu()
    y = getattr(kernel, name)(x)
    with Cost() as cost:
        y.backward(grad)
    assert sum(cost.launches.values()) == launches
    assert sum(cost.bytes.values()) <= most * grad.nbytes


@pytest.mark.parametrize("name", ["swiglu", "geglu", "clipped_swiglu"])
def test_an_odd_size_is_refused(kernel: ModuleType, name) -> None:
    with pytest.raises(ValueError, match=rf"{name}: .* even last dimension, got \[3, 33\]"):
        getattr(kernel, name)(gate_up(3, 33).npu())


@pytest.mark.parametrize("name", UNITS)
def test_gate_and_up_that_do_not_fit_are_named(kernel: ModuleType, name) -> None:
    function, x = getattr(kernel, name), gate_up(3, 32).npu()
    with pytest.raises(ValueError, match=r"one shape, got \[3, 32\] and \[3, 16\]"):
        function(x, x[:, :16])
    with pytest.raises(ValueError, match="one device, got npu:0 and cpu"):
        function(x, x.cpu())
    with pytest.raises(TypeError, match="up must be floating point"):
        function(x, x.long())
