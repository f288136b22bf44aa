"""Rows quantised to int8, and products of int8 matrices and weights, against float64."""

import pytest
import torch
import torch_npu

NUMBERS = {torch.int8: 1, torch.float16: 5, torch.bfloat16: 15}  # c10/core/ScalarType.h


def drawn(*shapes) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smooth", [None, "all", "groups"])
def test_rows_are_quantised_by_their_largest(dtype, smooth) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16).to(dtype)
    x[1, 1] = 0
    scales, ends = torch.rand(2, 16).to(dtype) + 0.5, torch.tensor([4, 6], dtype=torch.int32)
    options = {"all": {"smooth_scales": scales[0]}, "groups": {"smooth_scales": scales, "group_index": ends}}
    given = {k: v.to("npu") for k, v in options.get(smooth, {}).items()}
    y, scale = torch_npu.npu_dynamic_quant(x.to("npu"), **given)
    exact = x.double().view(6, 16)
    if smooth:
        exact = exact * (scales[0] if smooth == "all" else scales[[0] * 4 + [1] * 2]).double()
    largest = exact.abs().amax(-1)
    torch.testing.assert_close(scale.cpu().double().view(6), largest / 127, rtol=1e-6, atol=0)
    assert scale[1, 1] == 0
    assert (y[1, 1] == 0).all()
    # half a step, and what float32 adds at a tie
    error = (y.cpu().double().view(6, 16) * largest.unsqueeze(-1) / 127 - exact).abs()
    assert (error <= (0.5 + 1e-4) * largest.unsqueeze(-1) / 127).all()


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_of_int8_matrices(dtype, by_token, batch) -> None:
    if by_token and dtype == torch.int8:
        pytest.skip("int8 results have no scale of tokens")
    a, b = drawn((*batch, 3, 16), (*batch, 16, 4))
    scale, tokens = torch.rand(4) * 1e-3 + 1e-4, torch.rand(3) + 0.5
    whole = torch.randint(-500, 500, (4,), dtype=torch.int32)
    for bias in (whole, whole.float() if by_token or dtype == torch.bfloat16 else whole):
        offset = torch.tensor([3.0]) if dtype == torch.int8 else None
        options = {"pertoken_scale": tokens if by_token else None, "bias": bias, "offset": offset}
        options = {k: v if v is None else v.to("npu") for k, v in options.items()}
        found = torch_npu.npu_quant_matmul(
            a.to("npu"), b.to("npu"), scale.to("npu"), output_dtype=NUMBERS[dtype], **options
        )
        before, behind = (bias, 0) if bias.dtype == torch.int32 else (0, bias)
        factor = scale.double() * (tokens.double().unsqueeze(-1) if by_token else 1)
        expected = (a.double() @ b.double() + before) * factor + behind
        if dtype == torch.int8:
            assert ((expected + 3).clamp(-128, 127) - found.cpu().double()).abs().max() <= 0.51
            continue
        # one rounding, and 2^-10 of a scale that lost 13 of its bits
        lost = 0.0 if by_token or dtype == torch.bfloat16 else 2.0**-10
        tolerance = lost + (2.0**-11 if dtype == torch.float16 else 2.0**-8)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1.01 * tolerance, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 32])
@pytest.mark.parametrize("turned", [False, True])
def test_products_with_int8_weights(dtype, size, turned) -> None:
    torch.manual_seed(0)
    (weight,) = drawn((80, 8))
    x = torch.randn(3, 80).to(dtype)
    scale, offset = (torch.rand((3, 8) if size else (1, 8)).to(dtype) * s for s in (0.01, 4))
    bias = torch.randn(8).to(torch.float16 if dtype == torch.float16 else torch.float32)
    on_device = weight.T.contiguous().to("npu").T if turned else weight.to("npu")
    found = torch_npu.npu_weight_quant_batchmatmul(
        x.to("npu"), on_device, scale.to("npu"), offset.to("npu"), bias=bias.to("npu"), antiquant_group_size=size
    )
    groups = torch.arange(80) // 32 if size else torch.zeros(80, dtype=torch.int64)
    restored = (weight.double() + offset.double()[groups]) * scale.double()[groups]
    # each weight and the result are rounded: sums of 80 terms up to 4
    tolerance = 2.0**-9 if dtype == torch.float16 else 2.0**-6
    expected = x.double() @ restored + bias.double()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [0, 32])
def test_products_with_int4_weights_are_those_with_the_same_numbers_in_int8(size, turned) -> None:
    """As op-plugin packs them, in op_plugin/ops/opapi/ConvertWeightToINT4PackKernelNpuOpApi.cpp."""
    torch.manual_seed(0)
    numbers = torch.randint(-8, 8, (80, 16), dtype=torch.int8)
    laid = numbers.T.contiguous() if turned else numbers
    packed = sum((laid[:, place::8].long() & 15) << 4 * place for place in range(8)).to(torch.int32).to("npu")  # type: ignore
    scale = torch.rand((3, 16) if size else (1, 16)).half().to("npu")
    x = torch.randn(3, 80).half().to("npu")
    found, expected = (
        torch_npu.npu_weight_quant_batchmatmul(x, weight, scale, antiquant_group_size=size)
        for weight in (packed.T if turned else packed, numbers.to("npu"))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_scales_as_the_matrix_unit_takes_them_are_the_scales(dtype, shape) -> None:
    a, b = (t.to("npu") for t in drawn((3, 16), (16, 4)))
    scale, offset = torch.rand(4) * 1e-3 + 1e-4, torch.tensor([3.0, -7.0, 0.0, 100.0]) if dtype == torch.int8 else None
    given = [None if t is None else t.to("npu") for t in (scale, offset)]
    parameter = torch_npu.npu_trans_quant_param(*(None if t is None else t.view(shape) for t in given))
    found = torch_npu.npu_quant_matmul(a, b, parameter.flatten(), output_dtype=NUMBERS[dtype])
    expected = torch_npu.npu_quant_matmul(a, b, given[0], offset=given[1], output_dtype=NUMBERS[dtype])
    assert torch.equal(found, expected)
