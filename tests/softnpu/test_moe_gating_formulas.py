"""The choice of experts against plain torch in float64: order, ties, weights and gradient."""

import pytest
import torch
import torch_npu

from tests.support.rounding import ROUNDING

T, E, K = 9, 16, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNDERFLOW = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # of the smallest numbers
FLOAT32 = 2 * E * 2.0**-24  # relative, of exp, a sum of E terms and a few products in float32

softmax_top_k, softmax_top_k_v2 = torch_npu.npu_moe_gating_top_k_softmax, torch_npu.npu_moe_gating_top_k_softmax_v2
top_k, expert_tokens = torch_npu.npu_moe_gating_top_k, torch_npu.npu_moe_compute_expert_tokens
top_k_backward = torch.ops.npu.npu_moe_gating_top_k_backward


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of distinct multiples of 1/8, exact in 16 bits: the order of experts is certain."""
    rows = torch.rand(shape).argsort(-1) - shape[-1] // 2
    return (rows / 8).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.cpu().double() - expected).abs()
    assert (error <= (ROUNDING[found.dtype] + FLOAT32) * expected.abs() + UNDERFLOW[found.dtype]).all(), error.max()


@pytest.mark.parametrize("shape", [(T, E), (2, 3, E)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_before_and_behind_top_k(dtype, shape) -> None:
    x = logits(*shape, dtype=dtype)
    scores = torch.softmax(x.double(), -1)
    best, indices = x.double().topk(K)
    first, second = softmax_top_k(x.npu(), k=K), softmax_top_k_v2(x.npu(), k=K, output_softmax=True)
    behind = softmax_top_k_v2(x.npu(), k=K, renorm=1, output_softmax=True)
    for y, expert_idx, *_ in (first, second, behind):
        assert torch.equal(expert_idx.cpu().long(), indices)
        assert_close(y, torch.softmax(best, -1) if y is behind[0] else scores.gather(-1, indices))
    assert second[2].dtype == torch.float32
    assert_close(second[2], scores)
    assert softmax_top_k_v2(x.npu(), k=0, output_softmax=True)[2].isnan().all()


def test_the_lower_index_wins_a_tie() -> None:
    x = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]])
    for call in (softmax_top_k, softmax_top_k_v2, top_k):
        assert call(x.npu(), k=4)[1].tolist() == [[1, 2, 4, 0]]


def test_float16_compares_rounded_scores() -> None:
    """Of two scores that are the same multiple of its smallest number the first wins."""
    x = torch.tensor([[-14.0, -13.9921875, 2.0, 0.0]])
    assert softmax_top_k(x.half().npu(), k=4)[1].tolist() == [[2, 3, 0, 1]]
    assert softmax_top_k(x.npu(), k=4)[1].tolist() == [[2, 3, 1, 0]]


def test_row_indices_count_down_the_columns() -> None:
    assert softmax_top_k(torch.rand(3, E).npu(), k=2)[2].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert softmax_top_k(torch.rand(2, 2, E).npu(), k=2)[2].tolist() == [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]


@pytest.mark.parametrize("call", [softmax_top_k, softmax_top_k_v2])
def test_finished_rows_go_to_no_expert(call) -> None:
    finished = torch.tensor([False, True, False])
    expert_idx = call(torch.rand(3, E).npu(), finished=finished.npu(), k=K)[1]
    assert expert_idx.eq(E).all(-1).tolist() == finished.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gating_and_its_gradient(dtype) -> None:
    """In 16 bits, too; groups and softmax are compared in tests/fused_moe/test_gating_top_k.py."""
    x, bias, grad = logits(T, E, dtype=dtype), logits(E, dtype=dtype), torch.randn(T, K).to(dtype)
    leaf, options = x.npu().requires_grad_(), {"norm_type": 1, "routed_scaling_factor": 2.5}
    y, expert_idx, s = top_k(leaf, K, bias=bias.npu(), out_flag=True, **options)
    assert type(y.grad_fn).__name__ == "NpuMoeGatingTopKBackward0"
    y.backward(grad.npu())
    truth = x.double().requires_grad_()
    scores, chosen = torch.sigmoid(truth), expert_idx.cpu().long()
    assert torch.equal(chosen, (scores + bias.double()).topk(K).indices)
    assert_close(s, scores.detach())
    picked = scores.gather(1, chosen)
    expected = picked / picked.sum(-1, keepdim=True) * 2.5
    assert_close(y.detach(), expected.detach())
    expected.backward(grad.double())
    for found in (leaf.grad, top_k_backward(s, grad.npu(), expert_idx, **options)):
        assert found.dtype == dtype
        error = (found.cpu().double() - truth.grad).abs()
        # the two terms of the slope cancel: float32's error is relative to the larger one
        assert (
            error <= ROUNDING[dtype] * truth.grad.abs() + UNDERFLOW[dtype] + FLOAT32 * grad.double().abs().max()
        ).all()


def test_without_out_flag_the_scores_are_unwritten_and_the_gradient_is_not_a_number() -> None:
    leaf = logits(T, E).npu().requires_grad_()
    y, _, s = top_k(leaf, K, norm_type=1)
    assert s.isnan().all()
    y.sum().backward()
    assert leaf.grad.isnan().any()


def test_expert_tokens_are_the_ends_of_sorted_experts() -> None:
    experts = torch.tensor([0, 0, 2, 2, 2, 4], dtype=torch.int32)
    found = expert_tokens(experts.npu(), 6)
    assert found.tolist() == [2, 2, 5, 5, 6, 6]
    assert expert_tokens(experts[:0].npu(), 2).tolist() == [0, 0]
