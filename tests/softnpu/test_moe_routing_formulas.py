"""Routing for inference against loops over tokens: which rows go where, what stays unwritten, and their sums."""

import pytest
import torch
import torch_npu

from tests.support.rounding import ROUNDING

T, K, H, E = 6, 3, 8, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT32 = 16 * 2.0**-24  # of the operands: about ten operations in float32

init_routing, finalize = torch_npu.npu_moe_init_routing_v2, torch_npu.npu_moe_finalize_routing
COUNTED = {"expert_num": E, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}


def experts() -> torch.Tensor:
    return torch.randint(E, (T, K), dtype=torch.int32)


def order(indices: torch.Tensor, start: int = 0, end: int = E) -> list[int]:
    flat = indices.flatten().tolist()
    return sorted((i for i, e in enumerate(flat) if start <= e < end), key=flat.__getitem__)


@pytest.mark.parametrize(
    ("start", "end", "most"), [(0, E, -1), (1, 3, -1), *[(0, E, most) for most in (1, 7, T * K - 1, 2 * T * K)]]
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_rows_go_to_the_experts_in_range(dtype, start, end, most) -> None:
    x, indices, scale = torch.arange(T * H).view(T, H).to(dtype), experts(), torch.rand(T)
    options = COUNTED | {"active_expert_range": [start, end], "scale": scale.npu()}
    expanded, row_idx, counts, scales = init_routing(x.npu(), indices.npu(), active_num=most, **options)
    scattered = init_routing(x.npu(), indices.npu(), row_idx_type=1, **options)[1]
    places = order(indices, start, end)
    rows = len(places) if most < 0 else min(most, len(places))
    assert len(expanded) == (T * K if most < 0 else rows)
    assert torch.equal(expanded[:rows].cpu(), x[[i // K for i in places[:rows]]])
    assert torch.equal(scales[:rows].cpu(), scale[[i // K for i in places[:rows]]])
    assert scattered[: len(places)].tolist() == places
    assert sorted(scattered.tolist()) == list(range(T * K))  # op-plugin's tests compare the other experts too
    assert row_idx.tolist() == [places.index(i) if i in places else -1 for i in range(T * K)]
    assert counts.tolist() == [int((indices == e).sum()) for e in range(start, end)]
    unwritten = expanded[rows:]
    assert unwritten.eq(-1).all() if dtype == torch.int8 else unwritten.isnan().all()
    assert scales[rows:].isnan().all()


def test_no_rows_count_as_none() -> None:
    none = torch.ones(0, K, dtype=torch.int32)
    expanded, row_idx, counts, scales = init_routing(
        torch.ones(0, H).npu(), none.npu(), scale=torch.ones(0).npu(), quant_mode=1, **COUNTED
    )
    assert (expanded.shape, expanded.dtype, row_idx.shape, scales.shape) == ((0, H), torch.int8, (0,), (0,))
    assert counts.tolist() == [0] * E


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_expert_has_as_many_rows_with_padding(dtype, scaled) -> None:
    x, indices, scale = torch.arange(1, T * H + 1).view(T, H).to(dtype), experts(), torch.rand(T)
    expanded, row_idx, counts, scales = init_routing(
        x.npu(), indices.npu(), drop_pad_mode=1, expert_capacity=4, scale=scale.npu() if scaled else None, **COUNTED
    )
    expected, kept = torch.zeros(E, 4, H, dtype=dtype), [-1] * (T * K)
    steps = torch.zeros(E, 4)
    for e in range(E):
        for rank, i in enumerate(order(indices, e, e + 1)[:4]):
            expected[e, rank], kept[i], steps[e, rank] = x[i // K], 4 * e + rank, scale[i // K]
    assert torch.equal(expanded.cpu(), expected)
    assert row_idx.tolist() == kept
    assert counts.tolist() == [int((indices == e).sum()) for e in range(E)]  # the dropped ones too
    assert torch.equal(scales.cpu(), steps.flatten()) if scaled else scales.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [None, 1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_quantised_by_their_largest(dtype, given, padded) -> None:
    if padded and given == 2:
        given = E
    x, indices = torch.randn(T, H).to(dtype), experts()
    x[0] = 0
    smooth = None if given is None else torch.rand(given, H) + 0.5
    options = {"drop_pad_mode": 1, "expert_capacity": 4} if padded else {"active_expert_range": [1, 3]}
    expanded, row_idx, _, scales = init_routing(
        x.npu(), indices.npu(), quant_mode=1, scale=None if smooth is None else smooth.npu(), **COUNTED, **options
    )
    rows = expanded.cpu().double().reshape(-1, H) * scales.cpu().double().unsqueeze(-1)
    for i, place in enumerate(row_idx.tolist()):
        if place >= 0:
            e = indices.flatten()[i].item() - (0 if padded else 1)
            exact = x[i // K].double() * (1 if smooth is None else smooth[e if given != 1 else 0].double())
            step = exact.abs().max() / 127
            # half a step, and what float32 adds at a tie
            assert ((rows[place] - exact).abs() <= (0.5 + 1e-4) * step).all()


def test_pairs_name_the_experts_that_have_rows() -> None:
    indices = torch.tensor([[3, 0], [3, 4]], dtype=torch.int32).npu()
    options = COUNTED | {"expert_tokens_num_type": 2}
    pairs = init_routing(torch.ones(2, H).npu(), indices, **options)[2]
    assert pairs.tolist() == [[0, 1], [3, 2], [4, 1], [0, 0], [0, 0]]
    pairs = init_routing(torch.ones(2, H).npu(), indices, active_expert_range=[3, 5], **options)[2]
    assert pairs[:3].tolist() == [[3, 2], [4, 1], [0, 0]]


def expected_sum(rows, index, scales, experts, skips, bias) -> torch.Tensor:
    """In float64; index [T, K], -1 for no row."""
    flat = torch.cat([rows.double().reshape(-1, H), torch.zeros(1, H)])
    terms = flat[index.long()] if bias is None else flat[index.long()] + bias.double()[experts.long()]
    return (terms * scales.double().unsqueeze(-1)).sum(1) + sum(skip.double() for skip in skips)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("mode", "skips"), [(0, 2), (1, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize(("dtype", "scale_dtype"), [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32)])
def test_rows_are_weighted_and_summed(dtype, scale_dtype, mode, skips, with_bias) -> None:
    padded = mode in (1, 3)
    rows = torch.randn((E, 4, H) if padded else (T * K, H)).to(dtype)
    index = torch.randperm(rows[..., 0].numel())[: T * K].view(T, K).to(torch.int32)
    if padded:
        index[2, 1] = -1
    skip = [torch.randn(T, H).to(dtype) for _ in range(skips)]
    bias, chosen, scales = torch.randn(E, H).to(dtype), experts(), torch.rand(T, K).to(scale_dtype)
    found = finalize(
        rows.npu(),
        *[s.npu() for s in skip] + [None] * (2 - skips),
        bias.npu() if with_bias else None,
        scales.npu(),
        (index.t() if mode < 2 else index).flatten().npu(),
        chosen.npu(),
        mode,
    )
    expected = expected_sum(rows, index, scales, chosen, skip, bias if with_bias else None)
    magnitude = expected_sum(
        rows.abs(), index, scales, chosen, [s.abs() for s in skip], bias.abs() if with_bias else None
    )
    # float16 rounds the sum of the skips and, for every slot, three steps; the others round once
    steps = 2 + 3 * K if dtype == torch.float16 else 0
    error = (found.cpu().double() - expected).abs()
    assert (error <= ROUNDING[dtype] * (expected.abs() + steps * magnitude) + FLOAT32 * magnitude).all(), error.max()


def test_without_scales_every_row_counts_once() -> None:
    rows, index = torch.randn(T, H), torch.randperm(T).to(torch.int32)
    found = finalize(rows.npu(), None, None, None, None, index.npu(), None)
    assert torch.equal(found.cpu(), rows[index.long()])


def test_float16_rounds_after_every_step() -> None:
    """2048 and two ones: 2049 lies between two numbers of float16, where the even one is 2048 again."""
    index = torch.tensor([0, 1], dtype=torch.int32).npu()
    for dtype, expected in ((torch.float16, 2048.0), (torch.float32, 2050.0)):
        rows, skip, scales = (
            torch.full(shape, v, dtype=dtype).npu() for shape, v in (((2, 1), 1), ((1, 1), 2048), ((1, 2), 1))
        )
        assert finalize(rows, skip, None, None, scales, index, None).item() == expected


def test_rows_of_other_cards_are_ordered_by_expert() -> None:
    counts = torch.tensor([[1, 0, 2], [2, 1, 0]], dtype=torch.int32)
    x, scales = torch.arange(T * H).view(T, H).half(), torch.rand(T)
    # the experts of the rows as they come: 0 2 2 of the first card, 0 0 1 of the second
    wanted = [0, 3, 4, 5, 1, 2]
    moved, moved_scales, index, totals = torch_npu.npu_moe_re_routing(
        x.npu(), counts.npu(), per_token_scales=scales.npu()
    )
    assert torch.equal(moved.cpu(), x[wanted])
    assert torch.equal(moved_scales.cpu(), scales[wanted])
    assert index.tolist() == wanted
    assert totals.tolist() == [3, 1, 2]
