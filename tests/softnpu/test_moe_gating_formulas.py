"""The choice of experts against plain torch in float64: order, ties, weights, gradient and limits."""

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
def test_softmax_then_top_k(dtype, shape) -> None:
    x = logits(*shape, dtype=dtype)
    expected, indices = torch.softmax(x.double(), -1).topk(K)
    for y, expert_idx, *_ in (softmax_top_k(x.npu(), k=K), softmax_top_k_v2(x.npu(), k=K)):
        assert torch.equal(expert_idx.cpu().long(), indices)
        assert_close(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_then_softmax(dtype) -> None:
    x = logits(T, E, dtype=dtype)
    y, expert_idx, _ = softmax_top_k_v2(x.npu(), k=K, renorm=1, output_softmax=True)
    expected, indices = x.double().topk(K)
    assert torch.equal(expert_idx.cpu().long(), indices)
    assert_close(y, torch.softmax(expected, -1))


@pytest.mark.parametrize("shape", [(T, E), (2, 3, E)])
def test_the_softmax_itself_is_float32(shape) -> None:
    x = logits(*shape, dtype=torch.bfloat16)
    scores = softmax_top_k_v2(x.npu(), k=K, output_softmax=True)[2]
    assert_close(scores, torch.softmax(x.double(), -1))
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


def expected_weights(x, bias, k_group, groups, mode, norm_type, factor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row at a time, by the words of the documentation."""
    weights, indices = [], []
    for row in x.double():
        s = torch.softmax(row, -1) if norm_type == 0 else torch.sigmoid(row)
        chosen = s if bias is None else s + bias.double()
        parts = chosen.view(groups, -1)
        score = [part.max() if mode == 0 else part.sort().values[-2:].sum() for part in parts]
        best = sorted(range(groups), key=lambda g: -score[g])[:k_group]
        allowed = [e for e in range(E) if e // (E // groups) in best]
        picked = sorted(allowed, key=lambda e: -chosen[e])[:K]
        w = s[picked] / (s[picked].sum() + 1e-20) if norm_type == 1 else s[picked]
        weights.append(w * factor)
        indices.append(picked)
    return torch.stack(weights), torch.tensor(indices)


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize(("k_group", "groups", "mode"), [(1, 1, 0), (2, 4, 0), (2, 4, 1), (8, 8, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_of_the_best_groups(dtype, with_bias, k_group, groups, mode, norm_type) -> None:
    x = logits(T, E, dtype=dtype)
    bias = logits(E, dtype=dtype) if with_bias else None
    options = {"k_group": k_group, "group_count": groups, "group_select_mode": mode, "norm_type": norm_type}
    given = {"bias": None if bias is None else bias.npu(), "routed_scaling_factor": 2.5}
    y, expert_idx, s = top_k(x.npu(), K, out_flag=True, **given, **options)
    expected, indices = expected_weights(x, bias, k_group, groups, mode, norm_type, 2.5)
    assert torch.equal(expert_idx.cpu().long(), indices)
    assert_close(y, expected)
    assert_close(s, torch.softmax(x.double(), -1) if norm_type == 0 else torch.sigmoid(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_sigmoid_gating(dtype) -> None:
    x, bias, grad = logits(T, E, dtype=dtype), logits(E, dtype=dtype), torch.randn(T, K).to(dtype)
    leaf, options = x.npu().requires_grad_(), {"norm_type": 1, "routed_scaling_factor": 2.5}
    y, expert_idx, s = top_k(leaf, K, bias=bias.npu(), out_flag=True, **options)
    assert type(y.grad_fn).__name__ == "NpuMoeGatingTopKBackward0"
    y.backward(grad.npu())
    truth = x.double().requires_grad_()
    scores = torch.sigmoid(truth).gather(1, expert_idx.cpu().long())
    (scores / scores.sum(-1, keepdim=True) * 2.5).backward(grad.double())
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


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


INT = torch.int32


@pytest.mark.parametrize("call", [softmax_top_k, softmax_top_k_v2])
@pytest.mark.parametrize(
    ("x", "options", "rule"),
    [
        ((4,), {}, "x must have 2 or 3 dimensions"),
        ((4, 8), {"k": 9}, "k is 9; the device takes 0 to 8"),
        ((4, 8), {"k": -1}, "k is -1"),
        ((1, 2000), {"k": 1025}, "k is 1025; the device takes 0 to 1024"),
        ((4, 8), {"finished": (5,)}, r"finished must be bool \[4\], got bool \[5\]"),
        ((2, 4, 8), {"finished": (8,)}, r"finished must be bool \[2, 4\]"),
    ],
)
def test_what_softmax_gating_refuses(call, x, options, rule) -> None:
    if "finished" in options:
        options = options | {"finished": ones(*options["finished"], dtype=torch.bool)}
    with pytest.raises(RuntimeError, match=f"npu_moe_gating_top_k_softmax.*{rule}"):
        call(ones(*x), **options)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: softmax_top_k_v2(ones(4, 8), renorm=2), "renorm is 2"),
        (lambda: top_k(ones(2, 4, 8), 1), "x must have 2 dimensions"),
        (lambda: top_k(ones(4, 2049), 1), "2049 experts; the device takes at most 2048"),
        (lambda: top_k(ones(4, 8), 0), "k is 0; there are 1 groups of 8"),
        (lambda: top_k(ones(4, 8), 5, k_group=1, group_count=2), "k is 5; there are 1 groups of 4"),
        (lambda: top_k(ones(4, 8), 1, group_count=3), "group_count is 3, which does not divide 8"),
        (lambda: top_k(ones(4, 8), 1, k_group=3, group_count=2), "k_group is 3 of 2"),
        (lambda: top_k(ones(4, 8), 1, group_select_mode=2), "group_select_mode is 2"),
        (lambda: top_k(ones(4, 8), 1, group_count=8, group_select_mode=1), "groups of 1 expert cannot be compared"),
        (lambda: top_k(ones(1, 256), 1, group_count=128), "128 groups of 2 experts fill 4096 places"),
        (lambda: top_k(ones(4, 8), 1, bias=ones(8, dtype=torch.float16)), "the bias must be torch.float32"),
        (lambda: top_k(ones(4, 8), 1, bias=ones(7)), r"the bias must be torch.float32 \[8\]"),
        (lambda: top_k(ones(4, 8), 1, renorm=1), "renorm is 1"),
        (lambda: top_k(ones(4, 8), 1, norm_type=2), "norm_type is 2"),
        (
            lambda: top_k(ones(4, 8), 1, input_ids=ones(4, dtype=INT), tid2eid=ones(9, 1, dtype=INT)),
            "no form of the operator with input_ids",
        ),
        (lambda: top_k_backward(ones(4, 8), ones(4, 2), ones(4, 3, dtype=INT), norm_type=1), r"must be \[T, E\]"),
        (lambda: top_k_backward(ones(4, 8).half(), ones(4, 2), ones(4, 2, dtype=INT), norm_type=1), "float16"),
        (lambda: expert_tokens(ones(4, 1, dtype=INT), 2), "must have 1 dimension"),
        (lambda: expert_tokens(ones(4, dtype=INT), 0), "num_expert is 0; the device takes 1 to 2048"),
        (lambda: expert_tokens(torch.tensor([2, 1], dtype=INT).npu(), 3), "the indices must be sorted"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    with pytest.raises(RuntimeError, match=rule) as error:
        call()
    assert str(error.value).startswith("npu_moe_")
