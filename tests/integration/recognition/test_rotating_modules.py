"""Modules of other people's code that rotate are served because of what they compute, in whatever words."""

import copy

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
from tests.integration.recognition.blocks import said
from tests.integration.recognition.rotating_blocks import Block, as_list, assert_same, counted, kernelized, launched, on
from tests.integration.recognition.spellings import lookalike_rotating_modules as lookalikes
from tests.integration.recognition.spellings.lookalike_rotating_modules import LOOKALIKES
from tests.integration.recognition.spellings.other_peoples_rotating_modules import (
    LONGEST,
    SERVED,
    B,
    CachedPairs,
    D,
    Dynamic,
    FromAPosition,
    M,
    N,
    OfATile,
    OneTable,
    QueriesAndKeys,
    S,
    heads,
    rotate_half,
)
from tests.support.served import rows


@pytest.fixture(params=SERVED, ids=lambda cls: cls.__name__)
def served(request, registered):
    """A block with kernels on the NPU, its plain twin on the CPU, arguments, and the layer."""
    torch.manual_seed(0)
    layer, arguments = SERVED[request.param]
    plain = Block(request.param())
    return kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu")), plain, arguments(), layer


def test_it_is_served_by_the_layer_that_computes_the_same(served) -> None:
    model, plain, arguments, layer = served
    assert said(model) == [(layer, True)]
    assert [row.kind for row in rows(model)] == ["rotary calls"]
    expected = plain(*arguments)
    assert launched(lambda: model(*on("npu", arguments))) == len(as_list(expected))
    ours = model(*on("npu", arguments))
    assert type(ours) is type(expected)
    assert_same(ours, expected)


def test_options_that_it_does_not_read_are_left_out_of_its_calls(registered) -> None:
    model, x = kernelized(OfATile()), heads(False)
    assert launched(lambda: model.part(x.npu(), input_pos=None)) == 1
    torch.testing.assert_close(model.part(x.npu(), input_pos=None).cpu(), OfATile()(x), rtol=1e-5, atol=1e-5)
    tiles = torch.cat((x, x), dim=1)
    torch.testing.assert_close(model.part(tiles.npu()).cpu(), OfATile()(tiles), rtol=1e-5, atol=1e-5)


def test_its_gradients_are_those_of_its_own_forward_in_fewer_launches(served) -> None:
    model, plain, arguments, _ = served
    count = len(as_list(plain(*arguments)))
    leaves = [[x.to(device).requires_grad_() for x in arguments[:count]] for device in ("npu", "cpu")]
    rest = arguments[count:]

    def backward(model, leaves, rest) -> None:
        sum(x.square().sum() for x in as_list(model(*leaves, *rest))).backward()

    backward(model, leaves[0], on("npu", rest))
    backward(plain, leaves[1], rest)
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-5)
    moved, twin = on("npu", rest), copy.deepcopy(plain).to("npu")
    backward(model, leaves[0], moved)  # as another layer does
    ours, theirs = (sum(counted(lambda m=m: backward(m, leaves[0], moved)).values()) for m in (model, twin))
    assert ours < theirs


def test_in_16_bits_it_is_as_near_to_float64_as_its_own_forward(served) -> None:
    model, plain, arguments, _ = served
    count = len(as_list(plain(*arguments)))
    tensors, rest = on("cpu", arguments[:count], torch.bfloat16), arguments[count:]
    theirs, truth = as_list(plain(*tensors, *rest)), as_list(plain(*(x.double() for x in tensors), *rest))
    ours = as_list(model(*on("npu", tensors), *on("npu", rest)))
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        assert mine.dtype is other.dtype
        # the kernel rounds once, at the end: by half a unit at most
        limit = (other.double() - exact).norm() + torch.finfo(other.dtype).eps / 2 * exact.norm()
        assert (mine.cpu().double() - exact).norm() <= limit


@pytest.mark.parametrize("cls", LOOKALIKES, ids=lambda cls: cls.__name__)
def test_what_only_looks_like_one_is_left_alone(registered, cls) -> None:
    model = kernelized(cls())
    assert not any(swapped for _, swapped in said(model))
    assert "forward" not in vars(model.part)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (lookalikes.RopeOnTheHost, "the host waits for a number in it"),
        (lookalikes.RopeClamped, "it calls clamp"),
        (lookalikes.RopeWriting, "it writes to its arguments"),
        (lookalikes.RopeCaching, "it writes to its members"),
    ],
)
def test_the_report_says_what_no_rotation_does(registered, cls, reason: str) -> None:
    (row,) = rows(kernelized(cls()))
    assert row.reason == f"no kernel computes what its forward computes: {reason}"


def rope_by(x, cos, sin):
    return x * cos + rotate_half(x) * sin


class Tables(nn.Module):
    """Holds cos and sin."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.randn(S, D))
        self.register_buffer("sin", torch.randn(S, D))


class ByFunction(Tables):
    """Leaves the rotation to a function."""

    def forward(self, q, k):
        return rope_by(q, self.cos, self.sin), rope_by(k, self.cos, self.sin)


def test_a_function_that_is_served_is_not_served_twice(registered) -> None:
    plain = ByFunction()
    model, x = kernelized(copy.deepcopy(plain)), heads()
    assert [(row.path, row.kernel, row.swapped) for row in rows(model)] == [("part.rope_by", "RotaryPosEmb", True)]
    assert launched(lambda: model(x.npu(), x.npu())) == 2
    assert_same(model(x.npu(), x.npu()), plain(x, x))


def test_cos_and_sin_are_asked_for_once_for_queries_and_keys_of_all_layers(registered) -> None:
    model = kernelized(CachedPairs())
    q, k, positions = on("npu", (heads(False), heads(False, M), torch.randint(LONGEST, (B, S))))
    model(q, input_pos=positions)
    for x in (k, q):
        assert set(counted(lambda x=x: model(x, input_pos=positions))) == {"npu_rotary_mul"}
    assert len(counted(lambda: model(q, input_pos=positions.clone()))) > 1


def test_few_tokens_of_inference_are_its_own_until_a_second_layer_has_their_angles(registered) -> None:
    model = kernelized(CachedPairs())
    q, k, positions = on("npu", (heads(False), heads(False, M), torch.randint(LONGEST, (B, S))))
    with torch.no_grad():
        assert [launched(lambda x=x: model(x, input_pos=positions)) for x in (q, k, q, k)] == [0, 0, 1, 1]


@pytest.mark.parametrize("positions", [None, torch.arange(3, S + 3), torch.randint(LONGEST, (B, S))])
def test_positions_may_be_given_by_name_or_not_at_all(registered, positions: Tensor | None) -> None:
    for cls in (CachedPairs, OneTable):
        plain = cls()
        model, x = kernelized(copy.deepcopy(plain)), heads(False)
        given = None if positions is None else positions.npu()
        assert launched(lambda model=model, x=x, given=given: model(x.npu(), input_pos=given)) == 1
        assert_same(model(x.npu(), input_pos=given), plain(x, input_pos=positions))


def test_another_first_position_is_asked_for_again(registered) -> None:
    plain = FromAPosition()
    model, x = kernelized(copy.deepcopy(plain)), heads(False)
    for start in (0, 3, 1):
        assert_same(model(x.npu(), start), plain(x, start))
    assert_same(model(x.npu()), plain(x))


def test_every_length_is_rotated_as_it_rotates_it(registered) -> None:
    plain = Dynamic()
    model = kernelized(copy.deepcopy(plain))
    for length, launches in ((1, 1), (20, 1), (21, 0), (50, 0), (7, 1)):
        x = torch.randn(B, N, length, D)
        (row,) = rows(kernels_ext_npu.kernelize(kernels_ext_npu.restore(model)))
        assert (row.swapped, row.reason) == (True, None)
        assert launched(lambda x=x: model(x.npu())) == launches
        assert_same(model(x.npu()), plain(x))
        (row,) = rows(model)
        said = f"but it computes calls of {[*x.shape]} itself: it is not known to rotate these"
        assert (row.swapped, row.reason) == ((True, None) if launches else (False, said))


def test_a_table_that_is_too_short_is_its_own_error(registered) -> None:
    model = kernelized(QueriesAndKeys())
    x = torch.randn(B, N, LONGEST + 1, D, device="npu")
    with pytest.raises(RuntimeError, match="must match"):
        model(x, x)
