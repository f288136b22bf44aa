"""Products with a weight against float64."""

import pytest
import torch
import torch_npu
from torch.nn import functional as F

TOLERANCE = {torch.float32: 4e-6, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}  # sums of 16 to 32 up to 8, rounded


def drawn(*shapes, dtype=torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def compare(found, expected, dtype) -> None:
    assert found.is_contiguous()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_and_its_gradients(dtype) -> None:
    tensors = drawn((3, 16), (4, 16), (4,), dtype=dtype)
    on_device = [t.to("npu").requires_grad_() for t in tensors]
    leaves = [t.double().requires_grad_() for t in tensors]
    found, expected = torch_npu.npu_linear(*on_device), F.linear(*leaves)
    compare(found, expected, dtype)
    grad = torch.linspace(-1, 1, 12).view(3, 4)
    found.backward(grad.to(found))
    expected.backward(grad.to(dtype).double())
    for tensor, leaf in zip(on_device, leaves):
        compare(tensor.grad, leaf.grad, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_batches_change_places(dtype, turned, factor) -> None:
    x, weight = drawn((2, 3, 16), (2, 16, 32), dtype=dtype)
    given = x.transpose(0, 1).contiguous() if turned else x
    found = torch_npu.npu_transpose_batchmatmul(
        given.to("npu"), weight.to("npu"), perm_x1=[1, 0, 2] if turned else None, batch_split_factor=factor
    )
    expected = torch.einsum("bmk,bkn->mbn", x.double(), weight.double())
    if factor > 1:
        expected = torch.stack(expected.flatten(1).chunk(factor, -1))
    compare(found, expected, dtype)


ACTIVATIONS = {
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "precise"), [(torch.float16, 0), (torch.float16, 1), (torch.bfloat16, 0)])
@pytest.mark.parametrize("experts", [None, "tokens", "index"])
def test_feed_forward(activation, dtype, precise, experts) -> None:
    lead = () if experts is None else (2,)
    x, w1, w2 = (0.5 * t for t in drawn((2, 3, 16), (*lead, 16, 32), (*lead, 32, 16), dtype=dtype))
    bias_dtype = torch.float16 if dtype == torch.float16 else torch.float32
    b1, b2 = drawn((*lead, 32), (*lead, 16), dtype=bias_dtype)
    options = {"tokens": {"expert_tokens": [4, 2]}, "index": {"expert_tokens_index": [4, 6]}}.get(experts, {})
    found = torch_npu.npu_ffn(
        x.to("npu"), w1.to("npu"), w2.to("npu"), activation, bias1=b1.to("npu"), bias2=b2.to("npu"),
        inner_precise=precise, **options,
    )  # fmt: skip
    groups = [(x.view(6, 16), w1, w2, b1, b2)] if experts is None else zip(x.view(6, 16).split([4, 2]), w1, w2, b1, b2)
    parts = []
    for group in groups:
        rows, a, b, c, d = (t.double() for t in group)
        parts.append(ACTIVATIONS[activation](rows @ a + c) @ b + d)
    compare(found, torch.cat(parts).view(2, 3, 16), dtype)


def npu(*shape, dtype=torch.float16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: torch_npu.npu_linear(npu(2, 4), npu(3, 5)), "needs"),
        (lambda: torch_npu.npu_linear(*[npu(2, 4, dtype=torch.bfloat16)] * 2), "dtypes"),
        (lambda: torch_npu.npu_linear(npu(2, 4), npu(3, 4), npu(2)), "bias must be"),
        (lambda: torch_npu.npu_transpose_batchmatmul(npu(2, 3, 8), npu(2, 8, 16)), "multiples of 16"),
        (lambda: torch_npu.npu_transpose_batchmatmul(npu(2, 3, 16), npu(3, 16, 16)), "do not fit"),
        (lambda: torch_npu.npu_transpose_batchmatmul(npu(2, 3, 16), npu(2, 16, 16), batch_split_factor=3), "divide N"),
        (lambda: torch_npu.npu_transpose_batchmatmul(npu(2, 3, 16), npu(2, 16, 16), perm_y=[0, 1, 2]), "perm_y"),
        (lambda: torch_npu.npu_ffn(npu(2, 4), npu(4, 8), npu(8, 4), "tanh"), "activation must be"),
        (lambda: torch_npu.npu_ffn(npu(2, 4), npu(4, 8), npu(8, 5), "relu"), "needs"),
        (lambda: torch_npu.npu_ffn(npu(2, 4), npu(4, 8), npu(8, 4), "relu", inner_precise=2), "inner_precise"),
        (lambda: torch_npu.npu_ffn(npu(2, 4), *EXPERTS, "relu", expert_tokens=[1, 2]), "2 rows in all"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    with pytest.raises(RuntimeError, match=rule):
        call()


EXPERTS = (torch.ones(2, 4, 8).half().to("npu"), torch.ones(2, 8, 4).half().to("npu"))


def test_gated_and_quantised_forms_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="no quantised and no gated form"):
        torch_npu.npu_ffn(npu(2, 4), npu(4, 8), npu(4, 4), "swiglu", inner_precise=1)
    with pytest.raises(NotImplementedError, match="scale"):
        torch_npu.npu_transpose_batchmatmul(npu(2, 3, 16), npu(2, 16, 16), scale=npu(32).long())
