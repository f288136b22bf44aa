"""MoE token permutation against plain torch in float64, and its gradients through torch_npu's autograd formulas."""

import math

import pytest
import torch
import torch_npu

from softnpu.cann import CANN
from tests.support.rounding import assert_rounded

T, K, H, E = 7, 3, 8, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

permute, unpermute = torch_npu.npu_moe_token_permute, torch_npu.npu_moe_token_unpermute
permute_grad, unpermute_grad = torch.ops.npu.npu_moe_token_permute_grad, torch.ops.npu.npu_moe_token_unpermute_grad
permute_grad_v2 = torch.ops.npu.npu_moe_token_permute_grad_v2
unpermute_grad_v2 = torch.ops.npu.npu_moe_token_unpermute_grad_v2


def experts(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(E, shape, dtype=dtype)


def order(indices: torch.Tensor) -> list[int]:
    """Token and slot of every permuted row, by Python's stable sort."""
    flat = indices.flatten().tolist()
    return sorted(range(len(flat)), key=flat.__getitem__)


def expected_permute(tokens: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
    return tokens[torch.tensor(order(indices)[:rows], dtype=torch.int64) // (indices.numel() // len(indices))]


def expected_unpermute(rows: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Without the rows that were dropped."""
    slots = torch.tensor(order(indices)[: len(rows)])
    weighted = rows * probs.flatten()[slots].unsqueeze(-1)
    return torch.zeros(len(indices), rows.shape[1], dtype=rows.dtype).index_add(0, slots // K, weighted)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("shape", "num_out_tokens", "rows"),
    [((T,), None, 7), ((T, 1), 0, 7), *[((T, K), *e) for e in ((None, 21), (8, 8), (99, 21), (-4, 17), (-21, 0))]],
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_rows_come_in_the_stable_order_of_their_experts(dtype, shape, num_out_tokens, rows, index_dtype) -> None:
    tokens, indices = torch.arange(T * H).view(T, H).to(dtype), experts(*shape, dtype=index_dtype)
    permuted, sorted_indices = permute(tokens.npu(), indices.npu(), num_out_tokens)
    assert torch.equal(permuted.cpu(), expected_permute(tokens, indices, rows))
    assert sorted_indices.argsort().tolist() == order(indices)


def test_rows_of_probability_zero_and_rows_beyond_the_last_are_not_read() -> None:
    rows = torch.ones(4, H)
    rows[2] = math.nan
    sorted_indices = torch.tensor([0, 2, 3, 9, 1, 3], dtype=torch.int32)
    probs = torch.tensor([[0.5, 0.0], [0.25, 1.0], [1.0, 2.0]])
    found = unpermute(rows.npu(), sorted_indices.npu(), probs.npu())
    assert found[:, 0].tolist() == [0.5, 0.25, 3.0]
    assert unpermute(rows.npu(), sorted_indices.npu())[:, 0].isnan().tolist() == [False, True] + [False] * 4


@pytest.mark.parametrize(("index_dtype", "num_out_tokens"), [(torch.int32, None), (torch.int64, 12), (torch.int32, -2)])
@pytest.mark.parametrize("shape", [(T, K), (T, 1), (T,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_permute_sums_over_slots(dtype, shape, index_dtype, num_out_tokens) -> None:
    indices, tokens = experts(*shape, dtype=index_dtype), torch.randn(T, H).to(dtype)
    leaf = tokens.npu().requires_grad_()
    permuted, sorted_indices = permute(leaf, indices.npu(), num_out_tokens)
    assert type(permuted.grad_fn).__name__ == "NpuMoeTokenPermuteBackward0"
    grad = torch.randn(permuted.shape).to(dtype)
    permuted.backward(grad.npu())
    truth = tokens.double().requires_grad_()
    expected_permute(truth, indices, len(permuted)).backward(grad.double())
    slots = indices.numel() // T
    for found in (
        leaf.grad,
        permute_grad(leaf, grad.npu(), indices.npu(), sorted_indices),
        permute_grad_v2(grad.npu(), sorted_indices, T, dtype, slots),
    ):
        assert_rounded(found, truth.grad)


@pytest.mark.parametrize("rows", [T * K] + [12] * (CANN < (9, 1)))
@pytest.mark.parametrize("probs_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute_and_its_gradients(dtype, probs_dtype, rows) -> None:
    """Each is rounded once. grad_probs of dropped rows is zero; the others are sums over H."""
    indices, probs = experts(T, K), torch.rand(T, K).to(probs_dtype)
    permuted, grad = torch.randn(rows, H).to(dtype), torch.randn(T, H).to(dtype)
    _, sorted_indices = permute(torch.zeros(T, H).npu(), indices.npu())
    leaf, leaf_probs = permuted.npu().requires_grad_(), probs.npu().requires_grad_()
    out = unpermute(leaf, sorted_indices, leaf_probs)
    assert type(out.grad_fn).__name__ == "NpuMoeTokenUnpermuteBackward0"
    out.backward(grad.npu())
    truth, truth_probs = permuted.double().requires_grad_(), probs.double().requires_grad_()
    expected = expected_unpermute(truth, indices, truth_probs)
    assert_rounded(out, expected.detach())
    expected.backward(grad.double())
    direct = unpermute_grad(permuted.npu(), grad.npu(), sorted_indices, probs.npu())
    saved = {"permuted_tokens": permuted.npu()}
    second = unpermute_grad_v2(grad.npu(), sorted_indices, rows, dtype, probs.npu(), **saved)
    for found, found_probs in ((leaf.grad, leaf_probs.grad), direct, second):
        assert_rounded(found, truth.grad)
        assert_rounded(found_probs, truth_probs.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_unpermute_without_probs_is_moved(dtype) -> None:
    indices, grad = experts(T), torch.randn(T, H).to(dtype)
    leaf = torch.randn(T, H).to(dtype).npu().requires_grad_()
    sorted_indices = permute(leaf.detach(), indices.npu())[1]
    unpermute(leaf, sorted_indices).backward(grad.npu())
    assert torch.equal(leaf.grad.cpu(), expected_permute(grad, indices, T))


def test_rows_that_no_index_names_are_left_unwritten_in_the_gradient() -> None:
    """Since CANN 9.1 those, too, that lie behind as many rows as there are indices."""
    grad, sorted_indices = torch.ones(2, H), torch.tensor([3, 0], dtype=torch.int32)
    found, nothing = unpermute_grad_v2(grad.npu(), sorted_indices.npu(), 5, torch.float32)
    assert nothing is None
    assert found[:, 0].isnan().tolist() == [False, True, True, CANN >= (9, 1), True]


def test_the_gradient_of_unpermute_drops_rows_before_9_1_and_overwrites_memory_since_then() -> None:
    rows, probs = torch.ones(4, H).npu(), torch.ones(2, 3).npu()
    grad, sorted_indices = torch.ones(2, H).npu(), torch.arange(6, dtype=torch.int32).npu()
    if CANN < (9, 1):
        assert unpermute_grad(rows, grad, sorted_indices, probs)[1].flatten().tolist() == [H, H, H, H, 0, 0]
        return
    with pytest.raises(RuntimeError, match=r"names a row beyond the 4 there are; CANN 9\.1 writes behind them"):
        unpermute_grad(rows, grad, sorted_indices, probs)


def test_a_zero_probability_does_not_stop_nan_on_the_way_to_grad_probs() -> None:
    rows = torch.full((1, H), math.nan).npu()
    grad, sorted_indices = torch.ones(1, H).npu(), torch.zeros(1, dtype=torch.int32).npu()
    found, grad_probs = unpermute_grad(rows, grad, sorted_indices, torch.zeros(1, 1).npu())
    assert found.eq(0).all()
    assert grad_probs.isnan().all()
