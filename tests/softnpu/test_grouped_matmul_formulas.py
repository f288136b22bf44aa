"""Grouped matrix products against a loop in float64: what is written, and how it is rounded."""

import itertools

import pytest
import torch
import torch_npu

from tests.softnpu import formula_cases
from tests.support.rounding import ROUNDING

M, K, N, E = 11, 8, 6, 4
COUNTS = [3, 0, 5, 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = torch.bfloat16
BIAS = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float16}
UNDERFLOW = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # of the smallest numbers
FLOAT32 = (max(K, M) + 1) * 2.0**-24  # of the sum of magnitudes: every addition of the longest sum rounds once

gmm = torch_npu.npu_grouped_matmul
ACTIVATIONS = {0: torch.clone, **dict(zip((1, 2, 5), map(formula_cases.ACTIVATIONS.get, ("relu", "gelu", "silu"))))}


def npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.npu() for t in tensors]


def group_list(counts: list[int], kind: int) -> torch.Tensor:
    sizes = torch.tensor(counts)
    return (sizes if kind == 1 else sizes.cumsum(0)).npu()


def by_rows(x, weights, counts, kind=1, bias=None, split_item=2) -> torch.Tensor:
    options = {"split_item": split_item, "group_type": 0, "group_list_type": kind, "bias": bias}
    (y,) = gmm(npu(*x), npu(*weights), group_list=group_list(counts, kind), **options)
    return y


def by_sum(x, weight, counts, kind=1) -> torch.Tensor:
    options = {"split_item": 3, "group_type": 2, "group_list_type": kind}
    (y,) = gmm([x.npu().t()], [weight.npu()], group_list=group_list(counts, kind), **options)
    return y


def assert_rounded_once(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bias=None) -> None:
    """As near as the float64 product rounded once, but for the error of float32 inside."""
    left, right = left.double(), right.double()
    expected, magnitude = left @ right, left.abs() @ right.abs()
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    error = (found.cpu().double() - expected).abs()
    rounding = ROUNDING[found.dtype] * expected.abs() + UNDERFLOW[found.dtype]
    assert (error <= rounding + FLOAT32 * magnitude).all(), error.max()


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


# how many of weights and x are lists of a tensor for each group, and whether weights are transposed views
FORMS = [(0, False), (0, True), (1, False), (1, True), (2, False)]
GROUPS = [(COUNTS, False), (COUNTS, True), ([2, 0, 4, 1], True), ([0] * E, False)]
PRODUCTS = [
    (dtype, *form, *groups)
    for dtype, form, groups in itertools.product(DTYPES, FORMS, GROUPS)
    if form[0] < 2 or (dtype != torch.float32 and sum(groups[0]) == M)  # one x of float32; groups of several are all
]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("dtype", "lists", "turned", "counts", "with_bias"), PRODUCTS)
def test_rows_in_groups_times_weights(dtype, lists, turned, counts, with_bias, kind) -> None:
    """Rows beyond the groups are left unwritten."""
    covered = sum(counts)
    x, weight = sample(M, K, dtype=dtype), sample(E, K, N, dtype=dtype)
    x[covered:] = torch.nan
    bias = sample(E, N, dtype=BIAS[dtype])
    given = weight.mT.contiguous().mT if turned else weight
    weights, biases = ([given], [bias]) if lists == 0 else (list(given), list(bias))
    options = {"bias": npu(*biases) if with_bias else None, "split_item": 2 + kind}
    y = by_rows(x.split(counts) if lists == 2 else [x], weights, counts, kind, **options)
    assert y[covered:].isnan().all()
    for e, (part, out) in enumerate(zip(x[:covered].split(counts), y[:covered].split(counts))):
        assert_rounded_once(out, part, weight[e], bias[e] if with_bias else None)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("counts", [COUNTS, [1, 2, 0, 3]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_sum(dtype, counts, kind) -> None:
    """The gradient of weights: empty groups are zero, and what lies beyond the groups is not summed."""
    x, grad = sample(M, K, dtype=dtype), sample(M, N, dtype=dtype)
    x[sum(counts) :] = torch.nan
    y = by_sum(x, grad, counts, kind)
    covered = sum(counts)
    for out, left, right in zip(y, x[:covered].split(counts), grad[:covered].split(counts)):
        assert_rounded_once(out, left.t(), right)
        assert len(left) or out.eq(0).all()


@pytest.mark.parametrize("split_item", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_lists_of_products_without_groups(dtype, with_bias, split_item) -> None:
    x = [sample(2, 3, K, dtype=dtype), sample(5, 4, dtype=dtype)]
    weights = [sample(K, N, dtype=dtype), sample(4, 3, dtype=dtype)]
    bias = [sample(w.shape[1], dtype=BIAS[dtype]) for w in weights] if with_bias else [None, None]
    options = {"bias": npu(*bias)} if with_bias else {}
    y = gmm(npu(*x), npu(*weights), split_item=split_item, group_type=-1, **options)
    assert [out.shape for out in y] == [(2, 3, N), (5, 3)]
    for out, left, right, b in zip(y, x, weights, bias):
        assert_rounded_once(out, left, right, b)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_ends_on_the_host(dtype) -> None:
    x, weights = sample(M, K, dtype=dtype), [sample(K, N, dtype=dtype) for _ in range(E)]
    bias, ends = [sample(N, dtype=BIAS[dtype]) for _ in range(E)], torch.tensor(COUNTS).cumsum(0).tolist()
    expected = by_rows([x], weights, COUNTS, bias=npu(*bias)).split(COUNTS)
    for x_list, options in (
        ([x], {"split_item": 0, "group_list": ends}),
        ([x], {"split_item": 2, "group_list": ends}),
        (x.split(COUNTS), {"split_item": 1, "group_list": []}),
        (x.split(COUNTS), {"split_item": 3, "group_list": ends}),
        (x.split(COUNTS), {"split_item": 3, "group_list": []}),
        (x.split(COUNTS), {"split_item": 2, "group_type": 0}),
    ):
        y = gmm(npu(*x_list), npu(*weights), bias=npu(*bias), **options)
        assert len(y) == (E if options["split_item"] < 2 else 1)
        assert torch.equal(torch.cat(y), torch.cat(expected))


@pytest.mark.parametrize(("rows", "hidden", "width"), [(M, K, N), (1, K, N), (M, 1, N), (M, K, 1), (1, 1, 1)])
def test_sizes_of_one(rows, hidden, width) -> None:
    """Where strides do not tell a tensor from its transposed view."""
    x, weight, grad = sample(rows, hidden), sample(1, hidden, width), sample(rows, width)
    assert_rounded_once(by_rows([x], [weight], [rows]), x, weight[0])
    assert_rounded_once(by_sum(x, grad, [rows])[0], x.t(), grad)


def test_an_empty_x_makes_the_device_do_nothing() -> None:
    """Its results stay unwritten, those of empty parts of a sum too."""
    assert by_rows([sample(0, K)], [sample(E, K, N)], [0] * E).shape == (0, N)
    assert by_sum(sample(0, K), sample(0, N), [0] * E).isnan().all()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-20, 20, shape, dtype=torch.int8)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("scale_dtype", "dtype", "per_token", "act_type"),
    [
        (torch.int64, torch.int8, False, 0),
        (torch.float32, torch.float16, False, 5),
        (HALF, HALF, False, 0),
        (HALF, HALF, True, 2),
        (torch.float32, torch.float16, True, 1),
    ],
)
def test_products_of_int8_are_exact_and_scaled_once(single, scale_dtype, dtype, per_token, act_type) -> None:
    x, weight = integers(M, K), integers(E, K, N)
    bias = torch.randint(-9, 9, (E, N), dtype=torch.int32)
    # 19 bits, which a scale that is a parameter of the matrix unit keeps
    scale = torch.randint(1, 99, (E, N)).float() / 1024
    given = scale.view(torch.int32).long() if scale_dtype == torch.int64 else scale.to(scale_dtype)
    rows = torch.rand(M) + 0.5
    options = {"per_token_scale": npu(rows) if per_token else None, "act_type": act_type}
    lists = [[t] if single else list(t) for t in (weight, bias, given)]
    (y,) = gmm(
        npu(x), npu(*lists[0]), bias=npu(*lists[1]), scale=npu(*lists[2]), group_list=group_list(COUNTS, 1),
        split_item=2, group_type=0, group_list_type=1, output_dtype=dtype, **options,
    )  # fmt: skip
    factor = (scale if scale_dtype == torch.int64 else given).double()
    parts = [part.double() @ weight[e].double() + bias[e] for e, part in enumerate(x.split(COUNTS))]
    exact = torch.cat([part * factor[e] for e, part in enumerate(parts)])
    exact = exact * rows.double().unsqueeze(1) if per_token else exact
    exact = ACTIVATIONS[act_type](exact)
    assert y.dtype == dtype
    if dtype == torch.int8:  # ties may fall either way behind two roundings of float32
        assert (y.cpu() - exact.clamp(-128, 127)).abs().max() <= 0.5 + 1e-4
    else:
        # one rounding of the result, and float32 inside: two factors and an activation
        error = (y.cpu().double() - exact).abs()
        assert (error <= ROUNDING[dtype] * exact.abs() + UNDERFLOW[dtype] + 2.0**-20 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_weights_of_int8_are_restored_by_columns(dtype) -> None:
    x, weight = sample(M, K, dtype=dtype), integers(E, K, N)
    scale, offset = (sample(E, N).abs() / 8).to(dtype), torch.randint(-3, 3, (E, N)).to(dtype)
    options = {"antiquant_scale": npu(scale), "antiquant_offset": npu(offset)}
    (y,) = gmm(
        npu(x), npu(weight), group_list=group_list(COUNTS, 1), split_item=2, group_type=0, group_list_type=1, **options
    )
    restored = ((weight.double() + offset.double().unsqueeze(1)) * scale.double().unsqueeze(1)).float().to(dtype)
    for e, (part, out) in enumerate(zip(x.split(COUNTS), y.split(COUNTS))):
        assert_rounded_once(out, part, restored[e])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_products_of_groups_are_added_in_float32(dtype, in_place) -> None:
    x, weight, total = sample(M, K, dtype=dtype), sample(M, N, dtype=dtype), sample(E * K, N)
    y = total.npu()
    add = torch_npu.npu_grouped_matmul_add_ if in_place else torch_npu.npu_grouped_matmul_add
    found = add(y, *npu(x, weight), group_list(COUNTS, 0))
    assert (found is y) is in_place
    assert torch.equal(found, y)  # op-plugin's other form writes to its argument all the same, and returns a clone
    for e, (left, right) in enumerate(zip(x.split(COUNTS), weight.split(COUNTS))):
        rows = slice(e * K, (e + 1) * K)
        assert_rounded_once(found[rows], left.T, right, total[rows])
