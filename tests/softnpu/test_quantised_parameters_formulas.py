"""Quantisation with given scales against numpy in float64."""

import numpy as np
import pytest
import torch
import torch_npu


@pytest.mark.parametrize(
    ("dtype", "least", "largest"),
    [(torch.qint8, -128, 127), (torch.quint8, 0, 255), (torch.qint32, -(2**31), 2**31 - 1)],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_channels_are_divided_rounded_shifted_and_clamped(dtype, least, largest, axis) -> None:
    x, n = torch.randint(-2000, 2000, (4, 6)).float() / 8, (4, 6)[axis]
    scales, points = 2.0 ** torch.randint(-3, 1, (n,)), torch.randint(0, 20, (n,), dtype=torch.int32)
    y = torch_npu.npu_quantize(x.npu(), scales.npu(), points.npu(), dtype, axis)
    shape = (-1, 1) if axis == 0 else (1, -1)
    exact = np.rint(x.double().numpy() / scales.double().numpy().reshape(shape)) + points.numpy().reshape(shape)
    np.testing.assert_array_equal(y.cpu().numpy().astype(np.int64), np.clip(exact, least, largest))


@pytest.mark.parametrize(("shape", "axis"), [((8,), -1), ((3, 1), -2)])  # of columns, and of heads
def test_without_division_scale_and_offset_come_before_the_rounding(shape, axis) -> None:
    x, scale, offset = torch.randint(-99, 99, (3, 8)).half() / 4, torch.rand(shape).half(), torch.rand(shape).half()
    y = torch_npu.npu_quantize(x.npu(), scale.npu(), offset.npu(), torch.qint8, axis, False)
    exact = x.double() * scale.double() + offset.double()
    assert ((y.cpu() - exact).abs() <= 0.5 + 1e-5).all()  # float32 inside


def test_a_scale_keeps_19_bits_beside_a_flag_and_an_offset() -> None:
    scale, offset = torch.rand(5) * 9, torch.tensor([-3.0, 0.0, 7.0, 255.0, -256.0])
    bits = scale.numpy().view(np.uint32).astype(np.int64) & 0xFFFFE000
    assert torch_npu.npu_trans_quant_param(scale.npu()).tolist() == [int(b) | 1 << 46 for b in bits]
    wanted = [int(b) | 1 << 46 | (int(o) % 512) << 37 for b, o in zip(bits, offset.tolist())]
    assert torch_npu.npu_trans_quant_param(scale.npu(), offset.npu()).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_come_back_from_scale_and_offset(dtype) -> None:
    x = (torch.randn(3, 5, 32) * 4 + 2).to(dtype)
    y, scale, offset = (t.cpu() for t in torch_npu.npu_dynamic_quant_asymmetric(x.npu()))
    assert (y.amax(-1) == 127).all()
    restored = (y.double() - offset.double().unsqueeze(-1)) * scale.double().unsqueeze(-1)
    # half a step, and the offset's roundings in float32, of which it has seven digits
    assert ((restored - x.double()).abs() <= scale.double().unsqueeze(-1) * 0.5001).all()
