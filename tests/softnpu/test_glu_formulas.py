"""Gated linear units: where float16 rounds and what stays unwritten. Values are cases of test_formulas.py."""

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from tests.softnpu.formula_cases import CASES
from tests.softnpu.given import LONG, npu
from tests.support.rounding import ROUNDING, assert_rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_float16_rounds_between_its_products(dtype) -> None:
    x, dy, gelu = (3 * torch.randn(16, n) for n in (64, 32, 32))
    x, dy, gelu = (t.to(dtype) for t in (x, dy, gelu))
    activated, other = x.chunk(2, -1)
    y, own = (t.cpu() for t in torch_npu.npu_geglu(x.npu(), activate_left=True))
    assert torch.equal(y, other * own) == (dtype != torch.bfloat16)
    found = torch.ops.npu.npu_geglu_grad(dy.npu(), x.npu(), gelu.npu(), activate_left=True).cpu().chunk(2, -1)
    weighted = dy * other if dtype == torch.float16 else dy.double() * other.double()
    leaf = activated.double().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(weighted.double())
    # half the spacing of the smallest numbers, and what float32 leaves of slopes near zero
    limit = ROUNDING[dtype] * leaf.grad.abs() + 2.0**-25 * (dtype == torch.float16) + 2.0**-20 * leaf.grad.abs().max()
    assert ((found[0].double() - leaf.grad).abs() <= limit).all()
    assert torch.equal(found[1], dy * gelu)


@pytest.mark.parametrize(("counts", "written"), [([2, 1], 3), ([0, 0], 0), ([4, 9], 6), ([], 0)])
def test_rows_beyond_the_groups_are_left_unwritten(counts, written) -> None:
    x = (3 * torch.randn(2, 3, 8)).bfloat16()
    y = torch_npu.npu_clipped_swiglu(x.npu(), group_index=torch.tensor(counts, dtype=torch.int64).npu())
    found, expected = y.cpu().view(6, 4), CASES["npu_clipped_swiglu, woven"].formula(x.double().view(6, 8))
    assert found[written:].isnan().all()
    if written:
        assert_rounded(found[:written], expected[:written])


def test_no_rows_and_8192_groups_are_fine() -> None:
    assert [t.shape for t in torch_npu.npu_geglu(npu(0, 4))] == [(0, 2), (0, 2)]
    assert torch_npu.npu_clipped_swiglu(npu(0, 4)).shape == (0, 2)
    torch_npu.npu_clipped_swiglu(npu(2, 4), group_index=npu(8192, dtype=LONG))
