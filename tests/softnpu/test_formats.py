"""Ascend's internal formats: their number, size and refusals are torch_npu's, the bytes below are those of ND."""

from collections.abc import Iterator

import pytest
import torch
import torch_npu

NZ, NC1HWC0, ND = 29, 3, 2


@pytest.fixture(autouse=True)
def _internal_formats() -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize(
    ("shape", "number", "elements"),
    [
        ((20, 40), NZ, 3 * 2 * 16 * 16),  # 40 columns are three blocks of 16, 20 rows are two
        ((2, 3, 4, 5), NC1HWC0, 2 * 1 * 4 * 5 * 16),  # three channels are one block of 16
    ],
)
def test_a_cast_keeps_values_and_takes_the_size_of_the_format(shape, number, elements) -> None:
    x = torch.randn(shape, dtype=torch.float16)
    y = torch_npu.npu_format_cast(x.to("npu"), number)
    assert torch_npu.get_npu_format(y) == number
    assert torch_npu.get_storage_size(y) == elements
    assert torch.equal(y.cpu(), x)
    assert torch.equal((y + 1).cpu(), x + 1)
    torch_npu.npu_format_cast_(z := x.npu(), number)
    assert torch_npu.get_npu_format(z) == number
    assert torch.equal(z.cpu(), x)
    assert torch.equal(torch_npu.npu_format_cast(y, ND).cpu(), x)


def test_a_cast_may_name_a_dtype_for_the_blocks_of_the_format() -> None:
    x = torch.randn(20, 40, dtype=torch.float16)
    y = torch_npu.npu_format_cast(x.npu(), NZ, customize_dtype=torch.int8)
    assert torch_npu.get_npu_format(y) == torch_npu.Format.FRACTAL_NZ
    assert torch.equal(y.cpu(), x)
