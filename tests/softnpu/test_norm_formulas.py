"""The RMS norm operators against float64, with the rounding of the device's kernels."""

import pytest
import torch
import torch_npu

SHAPES = [(5, 7), (2, 3, 64), (1, 1, 8), (2, 3, 4, 33), (7, 2, 2100)]
PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
# half a unit in the last place of the result, relative: one rounding
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32 = 1e-6  # relative error of sums of up to 2100 terms in float32


def exact(x: torch.Tensor, gamma: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + gamma.double())


def within(found: torch.Tensor, expected: torch.Tensor, roundings: int) -> bool:
    error = (found.cpu().double() - expected).abs()
    return bool((error <= (roundings * ROUNDING[found.dtype] + FLOAT32) * expected.abs() + 1e-7).all())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("eps", [1e-6, 0.0, 1e-5])
@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_rounds_once(shape, dtypes, eps) -> None:
    x, gamma = torch.randn(shape).to(dtypes[0]), torch.randn(shape[-1]).to(dtypes[1])
    y, rstd = torch_npu.npu_rms_norm(x.to("npu"), gamma.to("npu"), eps)
    fast_path = dtypes == (torch.float16, torch.float16) and shape[-1] > 2000
    assert within(y, exact(x, gamma, eps), roundings=2 if fast_path else 1)
    expected = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    torch.testing.assert_close(rstd.cpu().double(), expected, rtol=FLOAT32, atol=0)


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_backward(shape, dtypes) -> None:
    x, gamma = torch.randn(shape).to(dtypes[0]), torch.randn(shape[-1]).to(dtypes[1])
    dy = torch.randn(shape).to(dtypes[0])
    leaves = [t.to("npu").requires_grad_() for t in (x, gamma)]
    torch_npu.npu_rms_norm(*leaves, 1e-6)[0].backward(dy.to("npu"))
    truth = [t.double().requires_grad_() for t in (x, gamma)]
    exact(*truth, 1e-6).backward(dy.double())
    for found, expected in zip(leaves, truth):
        assert found.grad.dtype == found.dtype
        # sums over the row and over the rows in float32, and one rounding
        scale = expected.grad.abs().max()
        error = (found.grad.cpu().double() - expected.grad).abs()
        assert (error <= ROUNDING[found.dtype] * expected.grad.abs() + 1e-5 * scale).all()


def test_gamma_over_several_dimensions() -> None:
    x, gamma = torch.randn(2, 3, 4, 5), torch.randn(4, 5)
    y, rstd = torch_npu.npu_rms_norm(x.to("npu"), gamma.to("npu"), 1e-6)
    flat = exact(x.flatten(2), gamma.flatten(), 1e-6).view_as(x)
    assert within(y, flat, roundings=1)
    assert rstd.shape == (2, 3, 1, 1)


def test_dgamma_is_float32_before_autograd_casts_it() -> None:
    x, gamma = torch.randn(3, 8, dtype=torch.bfloat16, device="npu"), torch.ones(8, dtype=torch.bfloat16, device="npu")
    _, rstd = torch_npu.npu_rms_norm(x, gamma, 1e-6)
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(x, x, gamma, rstd)
    assert (dx.dtype, dgamma.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_adds_the_one_in_float32(dtype) -> None:
    x, gamma = torch.randn(4, 32).to(dtype), torch.full((32,), 0.003).to(dtype)
    y, _ = torch_npu.npu_gemma_rms_norm(x.to("npu"), gamma.to("npu"), 1e-6)
    assert within(y, exact(x, gamma, 1e-6, offset=1.0), roundings=1)


@pytest.mark.parametrize("columns", [64, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_add_rms_norm_rounds_twice(dtype, columns) -> None:
    x1, x2, gamma = (torch.randn(shape).to(dtype) for shape in ((4, columns), (4, columns), (columns,)))
    y, rstd, total = torch_npu.npu_add_rms_norm(x1.to("npu"), x2.to("npu"), gamma.to("npu"), 1e-6)
    assert torch.equal(total.cpu(), x1 + x2)
    rounded_sum = dtype == torch.float16 or columns <= 2000
    normed = (x1 + x2 if rounded_sum else x1.double() + x2.double()).double()
    assert within(y, exact(normed, gamma, 1e-6), roundings=2)
    torch.testing.assert_close(
        rstd.cpu().double(), (normed.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), rtol=1e-6, atol=0
    )


def npu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


@pytest.mark.parametrize("functional", [False, True])
def test_the_second_version_writes_norm_and_sum_over_its_arguments(functional) -> None:
    x1, x2, gamma = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    y, rstd, total = torch_npu.npu_add_rms_norm(x1.to("npu"), x2.to("npu"), gamma.to("npu"))
    a, b = x1.to("npu"), x2.to("npu")
    if functional:
        found = torch.ops.npu.npu_add_rms_norm_v2_functional(a, b, gamma.to("npu"))
        assert torch.equal(a.cpu(), x1)
    else:
        found = torch.ops.npu.npu_add_rms_norm_v2(a, b, gamma.to("npu")), a, b
    assert all(torch.equal(f, e) for f, e in zip(found, (rstd, y, total)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_add_rms_norm_cast_returns_the_rounded_norm_twice(dtype) -> None:
    x1, x2, gamma = torch.randn(3, 64).to(dtype), torch.randn(3, 64).to(dtype), torch.rand(64).to(dtype)
    wide, narrow, _, total = torch_npu.npu_add_rms_norm_cast(*(t.to("npu") for t in (x1, x2, gamma)))
    assert wide.dtype == torch.float32
    assert torch.equal(wide, narrow.float())
    assert torch.equal(total.cpu(), x1 + x2)
    summed = (x1 + x2).double() if dtype == torch.float16 else x1.double() + x2.double()
    assert within(narrow, exact(summed, gamma, 1e-6), 2 if dtype == torch.float16 else 1)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (
            lambda: torch_npu.npu_rms_norm(npu(2, 4, dtype=torch.bfloat16), npu(4, dtype=torch.float16)),
            "bfloat16, float16",
        ),
        (lambda: torch_npu.npu_rms_norm(npu(2, 4), npu(4, dtype=torch.bfloat16)), "float32, bfloat16"),
        (lambda: torch_npu.npu_rms_norm(npu(2, 4, dtype=torch.int32), npu(4)), "int32, float32"),
        (lambda: torch_npu.npu_rms_norm(npu(2, 4), npu(3)), r"gamma must have the last dimensions of x .*\[3\]"),
        (lambda: torch_npu.npu_rms_norm(npu(2, 4), npu(2, 4)), "fewer than x"),
        (lambda: torch_npu.npu_rms_norm(npu(4), npu(4)), "2 to 8 dimensions"),
        (lambda: torch_npu.npu_rms_norm(npu(*[1] * 9), npu(1)), "2 to 8 dimensions"),
        (lambda: torch_npu.npu_gemma_rms_norm(npu(2, 4, dtype=torch.bfloat16), npu(4)), "bfloat16, float32"),
        (lambda: torch_npu.npu_gemma_rms_norm(npu(4, 2).t(), npu(4)), "contiguous"),
        (lambda: torch_npu.npu_gemma_rms_norm(npu(0, 4), npu(4)), "empty"),
        (lambda: torch_npu.npu_add_rms_norm(npu(2, 4), npu(1, 4), npu(4)), "differ in shape"),
        (
            lambda: torch_npu.npu_add_rms_norm(npu(2, 4), npu(2, 4), npu(4, dtype=torch.bfloat16)),
            "float32, float32, bfloat16",
        ),
        (lambda: torch_npu.npu_add_rms_norm(npu(0, 4), npu(0, 4), npu(4)), "empty"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    with pytest.raises(RuntimeError, match=rule) as error:
        call()
    assert "npu_" in str(error.value)


def test_empty_rows_are_fine() -> None:
    y, rstd = torch_npu.npu_rms_norm(npu(0, 4), npu(4))
    assert (y.shape, rstd.shape) == ((0, 4), (0, 1))


def test_operators_without_a_derivative_have_none() -> None:
    """As on the wheel: gemma silently gives no gradient, add_rms_norm raises."""
    x, gamma = npu(2, 4).requires_grad_(), npu(4).requires_grad_()
    torch_npu.npu_gemma_rms_norm(x, gamma)[0].sum().backward()
    assert x.grad is None
    with pytest.raises(RuntimeError, match="derivative for npu::npu_add_rms_norm is not implemented"):
        torch_npu.npu_add_rms_norm(x, x, gamma)[0].sum().backward()
