"""Activations and their gradients against float64."""

import pytest
import torch
import torch_npu
from torch.nn import functional as F

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}  # one rounding of the result


def fast(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-1.702 * x))


CASES = {
    "npu_silu": (torch_npu.npu_silu, F.silu, (torch.float32, torch.float16)),
    "npu_gelu": (torch_npu.npu_gelu, F.gelu, TOLERANCE),
    "npu_gelu tanh": (
        lambda x: torch_npu.npu_gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), TOLERANCE,
    ),
    "npu_fast_gelu": (torch_npu.npu_fast_gelu, fast, TOLERANCE),
    "fast_gelu": (torch_npu.fast_gelu, fast, TOLERANCE),
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, (*_, dtypes) in CASES.items() for d in dtypes])
def test_values_and_gradients(name, dtype) -> None:
    operator, exact, _ = CASES[name]
    x = torch.linspace(-6, 6, 96).view(8, 12).to(dtype)
    on_device, leaf = x.to("npu").t().requires_grad_(), x.double().t().requires_grad_()
    found, expected = operator(on_device), exact(leaf)
    assert found.is_contiguous()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    grad = torch.linspace(-1, 1, 96).view(12, 8).to(dtype)
    found.backward(grad.to("npu"))
    expected.backward(grad.double())
    # the gradient of silu is computed from the rounded result: two roundings
    torch.testing.assert_close(
        on_device.grad.cpu().double(), leaf.grad, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
    )


def test_silu_in_place_writes_to_its_argument() -> None:
    x = torch.linspace(-2, 2, 6).view(2, 3).to("npu")
    view = x.t()
    assert torch_npu.npu_silu_(view) is view
    torch.testing.assert_close(x.cpu(), F.silu(torch.linspace(-2, 2, 6).view(2, 3)))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mul_activates_the_first_half(approximate) -> None:
    x = torch.linspace(-3, 3, 24).view(2, 12)
    found = torch_npu.npu_gelu_mul(x.to("npu"), approximate=approximate)
    a, b = x.double().chunk(2, -1)
    torch.testing.assert_close(found.cpu().double(), F.gelu(a, approximate=approximate) * b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: torch_npu.npu_silu(torch.ones(2, dtype=torch.bfloat16, device="npu")), "dtypes"),
        (lambda: torch_npu.npu_gelu(torch.ones(2, device="npu"), approximate="erf"), "approximate must be"),
        (lambda: torch_npu.npu_gelu_mul(torch.ones(2, 3, device="npu")), "the last even"),
        (lambda: torch_npu.npu_gelu_mul(torch.ones(2, 1026, device="npu")), "at most 1024"),
        (lambda: torch_npu.npu_fast_gelu(torch.ones([1] * 9, device="npu")), "at most 8 dimensions"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    with pytest.raises(RuntimeError, match=rule):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mish_and_its_gradient(dtype) -> None:
    x = torch.linspace(-8, 8, 65).to(dtype)
    leaf, exact = x.npu().requires_grad_(), x.double().requires_grad_()
    y, expected = torch_npu.npu_mish(leaf), torch.nn.functional.mish(exact)
    y.sum().backward()
    expected.sum().backward()
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[
        dtype
    ]  # one, or of float32 inside
    for found, wanted in ((y.detach(), expected.detach()), (leaf.grad, exact.grad)):
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=rounding, atol=1e-6)
