"""Grouped matrix products against a loop in float64: what is written, how it is rounded, and what is refused."""

import pytest
import torch
import torch_npu

from tests.support.rounding import ROUNDING

M, K, N, E = 11, 8, 6, 4
COUNTS = [3, 0, 5, 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = torch.bfloat16
BIAS = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float16}
UNDERFLOW = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # of the smallest numbers
FLOAT32 = (max(K, M) + 1) * 2.0**-24  # of the sum of magnitudes: every addition of the longest sum rounds once

gmm = torch_npu.npu_grouped_matmul


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


@pytest.mark.parametrize("split_item", [2, 3])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_groups_times_one_weight(dtype, with_bias, kind, split_item) -> None:
    x, weight = sample(M, K, dtype=dtype), sample(E, K, N, dtype=dtype)
    bias = sample(E, N, dtype=BIAS[dtype]) if with_bias else None
    y = by_rows([x], [weight], COUNTS, kind, npu(bias) if with_bias else None, split_item)
    for e, (part, out) in enumerate(zip(x.split(COUNTS), y.split(COUNTS))):
        assert_rounded_once(out, part, weight[e], None if bias is None else bias[e])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("lists_of_x", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rows_in_groups_times_a_list_of_weights(dtype, lists_of_x, kind) -> None:
    x, weights = sample(M, K, dtype=dtype), [sample(K, N, dtype=dtype) for _ in range(E)]
    bias = [sample(N, dtype=BIAS[dtype]) for _ in range(E)]
    y = by_rows(x.split(COUNTS) if lists_of_x else [x], weights, COUNTS, kind, npu(*bias))
    for part, out, weight, b in zip(x.split(COUNTS), y.split(COUNTS), weights, bias):
        assert_rounded_once(out, part, weight, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_views_of_weights_are_taken(dtype) -> None:
    x, weight = sample(M, K, dtype=dtype), sample(E, N, K, dtype=dtype)
    options = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": group_list(COUNTS, 1)}
    forms = [[weight.npu().transpose(1, 2)]]
    if dtype != torch.float32:
        forms.append([w.t() for w in weight.npu().unbind()])
    for weights in forms:
        (y,) = gmm([x.npu()], weights, **options)
        for part, out, w in zip(x.split(COUNTS), y.split(COUNTS), weight):
            assert_rounded_once(out, part, w.t())


@pytest.mark.parametrize("counts", [[2, 0, 4, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("kind", [0, 1])
def test_rows_beyond_the_groups_are_left_unwritten(kind, counts) -> None:
    x, weight, covered = sample(M, K), sample(E, K, N), sum(counts)
    x[covered:] = torch.nan
    y = by_rows([x], [weight], counts, kind)
    assert y[covered:].isnan().all()
    for e, (part, out) in enumerate(zip(x[:covered].split(counts), y[:covered].split(counts))):
        assert_rounded_once(out, part, weight[e])


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
    exact = {0: exact, 1: exact.relu(), 2: torch.nn.functional.gelu(exact, approximate="tanh"),
             5: torch.nn.functional.silu(exact)}[act_type]  # fmt: skip
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


def test_a_list_of_x_says_itself_which_rows_are_a_group() -> None:
    x, weight = sample(M, K), sample(E, K, N)
    x, weight = x.to(HALF), weight.to(HALF)
    (y,) = gmm(npu(*x.split(COUNTS)), npu(*weight), split_item=2, group_type=0)
    assert torch.equal(y, by_rows([x], [weight], COUNTS))


def test_one_float32_x_takes_a_list_of_weights() -> None:
    x, weight = sample(M, K), sample(E, K, N)
    assert torch.equal(by_rows([x], weight, COUNTS), by_rows([x], [weight], COUNTS))


def test_a_list_without_ends_takes_x_of_more_dimensions() -> None:
    x, weight = sample(2, 3, K, dtype=HALF), sample(K, N, dtype=HALF)
    (y,) = torch.ops.npu.npu_grouped_matmul.List(npu(x), npu(weight), group_list=None)
    assert_rounded_once(y, x, weight)


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
        error = (found[rows].cpu().double() - total[rows].double() - left.double().T @ right.double()).abs()
        magnitude = total[rows].double().abs() + left.double().abs().T @ right.double().abs()
        assert (error <= FLOAT32 * magnitude).all()


@pytest.mark.parametrize("options", [{"transpose_x": False}, {"group_list_type": 1}, {"group_type": 0}])
def test_other_ways_to_add_products_are_refused(options) -> None:
    tensors = npu(sample(E * K, N), sample(M, K, dtype=HALF), sample(M, N, dtype=HALF))
    with pytest.raises(RuntimeError, match="npu_grouped_matmul_add_: takes transpose_x=True"):
        torch_npu.npu_grouped_matmul_add_(*tensors, group_list(COUNTS, 0), **options)


def ones(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def ends(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


def rows(x=None, weight=None, group_list=None, **options) -> list[torch.Tensor]:
    options = {"split_item": 2, "group_type": 0} | options
    x = [ones(4, 8)] if x is None else x
    weight = [ones(2, 8, 3)] if weight is None else weight
    return gmm(x, weight, group_list=ends(1, 4) if group_list is None else group_list, **options)


def parts(x=None, weight=None, **options) -> list[torch.Tensor]:
    x = ones(4, 8).t() if x is None else x
    return rows([x], [ones(4, 3) if weight is None else weight], **{"group_type": 2} | options)


def on_host(x=None, weight=None, group_list=(1, 4), **options) -> list[torch.Tensor]:
    x = [ones(4, 8)] if x is None else x
    return gmm(x, [ones(8, 3)] * 2 if weight is None else weight, group_list=list(group_list), **options)


FULL = torch.float32


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: rows(group_type=None), "Requires manual passing group_type"),
        (lambda: rows(group_type=1), r"must be -1, 0 or 2, but now is \[1\]"),
        (lambda: rows(split_item=0), r"split_item is 0; group_type 0 takes \(2, 3\)"),
        (lambda: rows(group_list_type=2), "group_list_type is 2"),
        (lambda: rows(act_type=1), "act_type is 1; only quantised x"),
        (lambda: rows(scale=[ones(2, 3)]), r"take \[\], .*given are \['scale'\]"),
        (lambda: rows(output_dtype=6), "give a result of torch.bfloat16, not torch.float32"),
        (lambda: rows(tuning_config=[1]), "tuning_config is given"),
        (lambda: rows([ones(4, 8, dtype=FULL)]), r"\(float32, bfloat16\)"),
        (lambda: rows([ones(4, 8), ones(4, 8, dtype=FULL)]), "tensors of one list differ in dtype"),
        (lambda: rows(bias=[ones(2, 3)]), "the bias of torch.bfloat16 must be torch.float32"),
        (lambda: rows(bias=[ones(3, dtype=FULL)]), r"the bias must be one tensor of shape \[2, 3\]"),
        (lambda: rows(group_list=ends(1, 4, dtype=torch.int32)), r"must be int64 .*got int32 \[2\]"),
        (lambda: rows(group_list=ends(1, 4)[None]), r"1 dimension, got int64 \[1, 2\]"),
        (lambda: rows(group_list=torch.tensor([1, 4])), "at least two devices"),
        (lambda: rows(group_list=ends(1, 2, 4)), "group_list has 3 groups and the weights have 2"),
        (lambda: rows(group_list=ends(3, 2)), r"decreases: sizes \[3, -1\]"),
        (lambda: rows(group_list=ends(-1, 2), group_list_type=1), "negative element"),
        (lambda: rows(group_list=ends(1, 5)), "the groups have 5 elements, more than the 4 of x"),
        (
            lambda: rows(weight=[ones(1025, 8, 3)], group_list=ends(*[0] * 1025)),
            "1025 groups; the device takes 1 to 1024",
        ),
        (lambda: gmm([ones(4, 8)], [ones(2, 8, 3)], split_item=2, group_type=0), "need a group_list"),
        (lambda: rows(weight=[ones(2, 7, 3)]), "differ in the size K"),
        (lambda: rows(weight=[ones(8, 3)]), "weight must have 3 dimensions here"),
        (lambda: rows([ones(1, 4, 8)]), "x must have 2 dimensions here"),
        (lambda: rows([ones(8, 4).t()]), r"x must not be transposed here, got .* strides \[1, 4\]"),
        (lambda: rows(weight=[ones(2, 8, 6)[..., :3]]), "contiguous or the transposed view of a contiguous tensor"),
        (lambda: rows(weight=[ones(8, 3), ones(3, 8).t()]), "all weights are transposed or none"),
        (lambda: rows(weight=[ones(8, 3), ones(8, 4)]), r"one size N, got \[3, 4\]"),
        (lambda: rows(weight=[ones(8, 3)] * 129, group_list=ends(*[0] * 129)), "weight has 129 tensors"),
        (lambda: rows([ones(4, 8)] * 3, [ones(8, 3)] * 2), "3 tensors x and 2 weights"),
        (lambda: rows([ones(2, 8)] * 2, [ones(8, 3)] * 2), r"group_list says \[1, 3\] rows a group, .* have \[2, 2\]"),
        (lambda: rows([ones(2, 8, dtype=FULL)] * 2, [ones(8, 3, dtype=FULL)] * 2), "float32 takes one x"),
        (lambda: rows([ones(1, 65536)], [ones(1, 65536, 1)], ends(1)), "65536 elements .* at most 65535"),
        (lambda: rows([ones(4, 8, dtype=torch.int8)], [ones(2, 8, 3, dtype=torch.int8)]), r"with \['scale'\] required"),
        (
            lambda: rows([ones(4, 8, dtype=torch.int8)], [ones(2, 8, 3, dtype=torch.int8)], scale=[ones(2, 3)]),
            r"\(scale, result\) must be",
        ),
        (lambda: parts(bias=[ones(3, dtype=FULL)]), "group_type 2 takes no bias"),
        (lambda: parts(ones(8, 4)), r"takes x as the transposed view .* strides \[4, 1\]"),
        (lambda: parts(weight=ones(3, 4).t()), "weight must not be transposed"),
        (lambda: rows([ones(4, 8).t()] * 2, [ones(4, 3)] * 2, group_type=2), "takes one of each"),
        (lambda: rows(group_type=-1, split_item=0), "group_type -1 takes no group_list"),
        (lambda: gmm([ones(4, 8)], [ones(8, 3)], group_type=-1, split_item=2), "split_item is 2; group_type -1"),
        (lambda: gmm([ones(8)], [ones(8, 3)], group_type=-1), "x must have 2 to 6 dimensions"),
        (lambda: gmm([], [ones(8, 3)], group_type=-1), "x has 0 tensors"),
        (lambda: on_host(group_type=0), "group_type is given"),
        (lambda: on_host(group_list_type=1), "group_list_type is given"),
        (lambda: on_host(split_item=4), "split_item is 4"),
        (lambda: on_host(group_list=[4]), "group_list has one end"),
        (lambda: on_host(group_list=[1, 3]), "the last end must be the number of rows"),
        (lambda: on_host(group_list=[1, 2, 4]), "1 tensors x, 2 weights and 3 ends"),
        (lambda: on_host([ones(1, 8), ones(3, 8)]), "takes no group_list"),
        (lambda: on_host([ones(1, 8), ones(3, 8)], [ones(3, 8).t()] * 2, []), "takes no transposed weight"),
        (lambda: on_host([ones(2, 8)] * 2, split_item=2), "they must be the same groups"),
    ],
)
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule) -> None:
    with pytest.raises(RuntimeError, match=rule) as error:
        call()
    assert "npu_grouped_matmul" in str(error.value)
