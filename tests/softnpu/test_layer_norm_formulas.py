"""The layer norm of a sum, DeepNorm and the group norm with SiLU against float64."""

import pytest
import torch
import torch_npu
from torch.nn import functional as F

# sums of 16 float32; one rounding of values up to 4
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


def drawn(dtype, parameters=None, shape=(2, 3, 16)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x1, x2 = (torch.randn(shape).to(dtype) for _ in range(2))
    gamma, beta = (torch.rand(shape[-1]).to(parameters or dtype) + 0.5 for _ in range(2))
    return [x1, x2, gamma, beta]


def compare(found, expected, dtype) -> None:
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "parameters"), [(d, p) for d in TOLERANCE for p in {d, torch.float32}])
def test_add_layer_norm(dtype, parameters) -> None:
    inputs = drawn(dtype, parameters)
    on_device = [t.to("npu").requires_grad_() for t in inputs]
    leaves = [t.double().requires_grad_() for t in inputs]
    y, mean, rstd, x = torch_npu.npu_add_layer_norm(*on_device, 1e-5, True)
    total = leaves[0] + leaves[1]
    expected = F.layer_norm(total, (16,), leaves[2], leaves[3], 1e-5)
    compare(y, expected, dtype)
    compare(x, total, dtype)
    compare(mean, total.mean(-1, keepdim=True), torch.float32)
    compare(rstd, 1 / (total.var(-1, correction=0, keepdim=True) + 1e-5).sqrt(), torch.float32)
    grad = torch.linspace(-1, 1, y.numel()).view_as(y)
    torch.autograd.backward([y, x], [grad.to(y), grad.to(x)])
    torch.autograd.backward([expected, total], [grad.to(dtype).double()] * 2)
    for tensor, leaf in zip(on_device, leaves):  # both sums of 6 rows and the gradient are rounded
        torch.testing.assert_close(
            tensor.grad.cpu().double(), leaf.grad, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_norm_of_two_dtypes_is_float32(dtype) -> None:
    x1, x2, gamma, beta = drawn(torch.float32)
    y, _, _, x = torch_npu.npu_add_layer_norm(*(t.npu() for t in (x1, x2.to(dtype), gamma, beta)), 1e-5, True)
    total = x1.double() + x2.to(dtype).double()
    assert y.dtype == x.dtype == torch.float32
    compare(x, total, torch.float32)
    compare(y, F.layer_norm(total, (16,), gamma.double(), beta.double(), 1e-5), torch.float32)


def test_the_sum_is_not_written_unless_it_is_asked_for() -> None:
    assert torch_npu.npu_add_layer_norm(*(t.to("npu") for t in drawn(torch.float32)))[3].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_deep_norm(dtype) -> None:
    x, gx, gamma, beta = drawn(dtype)
    on_device = [t.to("npu").requires_grad_() for t in (x, gx, beta, gamma)]
    leaves = [t.double().requires_grad_() for t in (x, gx, beta, gamma)]
    mean, rstd, y = torch_npu.npu_deep_norm(*on_device, 0.7, 1e-6)
    total = 0.7 * leaves[0] + leaves[1]
    expected = F.layer_norm(total, (16,), leaves[3], leaves[2], 1e-6)
    compare(y, expected, dtype)
    compare(mean, total.mean(-1, keepdim=True), torch.float32)
    assert rstd.shape == (2, 3, 1)
    grad = torch.linspace(-1, 1, y.numel()).view_as(y)
    y.backward(grad.to(y))
    expected.backward(grad.to(dtype).double())
    for tensor, leaf in zip(on_device, leaves):
        torch.testing.assert_close(
            tensor.grad.cpu().double(), leaf.grad, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("affine", [False, True])
def test_group_norm_silu(dtype, affine) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 3, 5).to(dtype), torch.rand(4), torch.rand(4)
    given = [weight.to("npu"), bias.to("npu")] if affine else [None, None]
    out, mean, rstd = torch_npu.npu_group_norm_silu(x.to("npu"), *given, 2)
    expected = F.silu(F.group_norm(x.double(), 2, *([weight.double(), bias.double()] if affine else []), eps=1e-5))
    compare(out, expected, dtype)
    groups = x.double().reshape(2, 2, -1)
    compare(mean, groups.mean(-1), dtype)
    compare(rstd, 1 / (groups.var(-1, correction=0) + 1e-5).sqrt(), dtype)
    assert mean.dtype == (torch.float32 if affine else dtype)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda a, b, g: torch_npu.npu_add_layer_norm(a, b.half(), g.half(), g), "dtypes"),
        (lambda a, b, g: torch_npu.npu_add_layer_norm(a, b[:1], g, g), "differ in shape"),
        (lambda a, b, g: torch_npu.npu_add_layer_norm(a, b, g[:8], g[:8]), "gamma must be"),
        (lambda a, b, g: torch_npu.npu_deep_norm(a, b, g.half(), g), "dtypes"),
        (lambda a, b, g: torch_npu.npu_group_norm_silu(a, g[:3], g[:3], 2), "divide the 3 channels"),
        (lambda a, b, g: torch_npu.npu_group_norm_silu(a, g[:3], None, 3), "given together"),
        (lambda a, b, g: torch_npu.npu_group_norm_silu(a, g[:3].half(), g[:3].half(), 3), "dtypes"),
        (lambda a, b, g: torch_npu.npu_group_norm_silu(a, g[:3], g[:3], 3, 0.0), "eps must be positive"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    a, b, gamma, _ = (t.to("npu") for t in drawn(torch.float32))
    with pytest.raises(RuntimeError, match=rule):
        call(a, b, gamma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_group_norm_swish_and_its_gradients(dtype, scale) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in ((2, 6, 5), (6,), (6,), (2, 6, 5))]
    *leaves, dy = (t.npu().requires_grad_() for t in tensors)
    y, mean, rstd = torch_npu.npu_group_norm_swish(leaves[0], 3, *leaves[1:], eps=1e-5, swish_scale=scale)
    y.backward(dy.detach())
    *exact, exact_dy = (t.double().requires_grad_() for t in tensors)
    normed = torch.nn.functional.group_norm(exact[0], 3, *exact[1:], eps=1e-5)
    expected = normed * torch.sigmoid(scale * normed)
    expected.backward(exact_dy.detach())
    # one rounding of the result, and of the statistics that the gradient reads in the same dtype
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3 * 2.0**-7, torch.float16: 3 * 2.0**-10}[dtype]
    assert (mean.shape, rstd.shape, mean.dtype) == ((2, 3), (2, 3), dtype)
    for found, wanted in zip([y.detach(), *(t.grad for t in leaves)], [expected.detach(), *(t.grad for t in exact)]):
        bound = tolerance * wanted.abs().max().item()
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=bound)


def test_layer_norm_eval_is_the_layer_norm() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(torch.bfloat16) for shape in ((3, 4, 8), (8,), (8,)))
    found = torch_npu.npu_layer_norm_eval(x.npu(), [8], weight.npu(), bias.npu()).cpu().double()
    exact = torch.nn.functional.layer_norm(x.double(), [8], weight.double(), bias.double())
    torch.testing.assert_close(found, exact, rtol=2.0**-8, atol=1e-5)  # one rounding
