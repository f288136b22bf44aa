"""Products of heads with the keys' and the values' part of one weight: results, what is read, and derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.swaps.attention.head_products import HeadProducts
from tests.support.nearness import TOLERANCE, assert_near

_HEADS, _KEYS, _RANK = 8, 64, 256


def _drawn(batch: int, queries: int, values: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a weight, the queries of an attention, and by head the rows for both products."""
    generator = torch.Generator().manual_seed(0)
    shapes = (_HEADS, _KEYS + values, _RANK), (batch, _HEADS, queries, _KEYS)
    weight, query = (torch.randn(shape, generator=generator).to("npu", dtype) for shape in shapes)
    sums = torch.randn(_HEADS, batch * queries, _RANK, generator=generator).to("npu", dtype)
    return weight, query, query.transpose(0, 1).flatten(1, 2), sums


def _in_float64(weight: Tensor, rows: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    weight, rows, sums = (tensor.cpu().double() for tensor in (weight, rows, sums))
    return rows @ weight[:, :_KEYS], sums @ weight[:, _KEYS:].mT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("values", [_KEYS, 48], ids=["equal parts", "other parts"])
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (3, 1), (2, 5)])
def test_products_are_those_with_each_part(batch: int, queries: int, values: int, dtype: torch.dtype) -> None:
    weight, query, rows, sums = _drawn(batch, queries, values, dtype)
    with torch.no_grad():
        by_head = HeadProducts(weight, _KEYS, query)
        found = by_head.absorb(rows), by_head.expand_values(sums)
    rounded_once = TOLERANCE if dtype is torch.float32 else torch.finfo(dtype).eps / 2
    for ours, truth in zip(found, _in_float64(weight, rows, sums)):
        assert_near(ours, truth, rounded_once)


def test_one_token_reads_each_part_once() -> None:
    weight, query, rows, sums = _drawn(1, 1, _KEYS, torch.bfloat16)
    with torch.no_grad(), Cost() as cost:
        by_head = HeadProducts(weight, _KEYS, query)
        found = by_head.absorb(rows), by_head.expand_values(sums)
    small = sum(tensor.nbytes for tensor in (query, rows, sums, *found)) + 8 * 8 * _HEADS  # and where rows end
    assert cost.bytes.total() < weight.nbytes + 2 * small


def test_products_that_may_be_derived_have_derivatives() -> None:
    weight, query, rows, sums = _drawn(2, 3, _KEYS, torch.float32)
    weight.requires_grad_()
    by_head = HeadProducts(weight, _KEYS, query)
    (by_head.absorb(rows).sum() + by_head.expand_values(sums).sum()).backward()
    expected = weight.detach().cpu().double().requires_grad_()
    keys, values = (tensor.cpu().double() for tensor in (rows, sums))
    ((keys @ expected[:, :_KEYS]).sum() + (values @ expected[:, _KEYS:].mT).sum()).backward()
    assert_near(weight.grad, expected.grad)

    tangent = torch.ones_like(weight)
    with torch.no_grad():
        _, found = torch.func.jvp(lambda w: HeadProducts(w, _KEYS, query).absorb(rows), (weight.detach(),), (tangent,))
    assert_near(found, keys @ torch.ones(_HEADS, _KEYS, _RANK, dtype=torch.float64))
