"""Routers of other people's code are served because of what they compute, in whatever words."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kernels_ext_npu
from tests.integration.recognition.blocks import Block, launched, said
from tests.integration.recognition.router_blocks import OPERATORS, given, made, spread
from tests.integration.recognition.spellings.lookalike_routers import LIKE_ROUTERS
from tests.integration.recognition.spellings.other_peoples_routers import (
    EXPERTS,
    ROUTERS,
    WIDTH,
    Dispatcher,
    Inferring,
    NarrowGate,
    QuarterGate,
)
from tests.support.served import rows

CASES = pytest.mark.parametrize("cls", ROUTERS, ids=lambda cls: cls.__name__)


@CASES
@torch.no_grad()
def test_it_gives_the_experts_and_weights_of_its_formula(registered, cls: type[nn.Module]) -> None:
    model, plain, rule = made(cls)
    assert said(model) == [(rule.layer, True)]
    x = given(plain)
    results: list[tuple] = []
    assert launched(lambda: results.append(model.part(x.npu())), OPERATORS) == 1
    (found,), expected = results, plain(x)
    # exponentials and sums of float32
    torch.testing.assert_close(spread(rule, found).double(), rule.weights(plain, x), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(found, expected, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs
            assert type(mine) is type(theirs)
            continue
        assert (mine.dtype, mine.shape, mine.device.type) == (theirs.dtype, theirs.shape, "npu")
        if theirs.is_floating_point() and theirs.shape[-1:] == (EXPERTS,):  # logits, or all scores
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [cls for cls in ROUTERS if cls is not Inferring], ids=lambda cls: cls.__name__)
def test_its_gradients_are_those_of_its_formula(registered, cls: type[nn.Module]) -> None:
    model, plain, rule = made(cls)
    x, factors = given(plain), torch.randn(EXPERTS, dtype=torch.float64)
    theirs, ours = x.clone().double().requires_grad_(), x.npu().requires_grad_()
    (rule.weights(plain, theirs) * factors).square().sum().backward()
    result = model.part(ours)
    logits = [each for each in result if torch.is_tensor(each) and each.shape[-1:] == (EXPERTS,)]
    assert all(each.requires_grad for each in logits)
    (spread(rule, result).double() * factors).square().sum().backward()
    for mine, other in [(ours, theirs), *zip(model.part.parameters(), plain.parameters(), strict=True)]:
        if other.requires_grad:  # of sums of ten products of float32
            torch.testing.assert_close(mine.grad.cpu().double(), other.grad.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [cls for cls in ROUTERS if cls is not NarrowGate], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_in_16_bits_it_chooses_as_its_class_and_weighs_as_near_to_float64(registered, cls, dtype: torch.dtype) -> None:
    model, plain, rule = made(cls)
    model, plain = model.to(dtype), plain.to(dtype)
    x = given(plain, dtype).repeat(3, *[1 for _ in given(plain).shape[1:]])
    x += torch.randn_like(x)
    results: list[tuple] = []
    assert launched(lambda: results.append(model.part(x.npu())), OPERATORS) == 1
    (found,), expected = results, plain(x)
    dtypes = [[each.dtype for each in result if torch.is_tensor(each)] for result in (found, expected)]
    assert dtypes[0] == dtypes[1]
    ours, theirs, truth = spread(rule, found).double(), spread(rule, expected).double(), rule.weights(plain, x)
    is_chosen = truth > 0
    noises = (x * (1 + 2**-6 * torch.randn_like(x)) for _ in range(3))  # by more than 16 bits round logits
    apart = torch.stack([((rule.weights(plain, noisy) > 0) == is_chosen).all(-1) for noisy in noises]).all(0)
    assert apart.sum() >= 10
    assert torch.equal((ours > 0)[apart], is_chosen[apart])
    assert torch.equal((theirs > 0)[apart], is_chosen[apart])
    ours, theirs, truth = ours[apart], theirs[apart], truth[apart]
    # weights of sums that are rounded less often: by half a unit at the end at most
    assert (ours - truth).norm() <= (theirs - truth).norm() + torch.finfo(dtype).eps / 2 * truth.norm()


@torch.no_grad()
def test_logits_are_multiplied_in_the_dtype_in_which_its_class_multiplies(registered) -> None:
    model, plain, rule = made(QuarterGate)
    model, x = model.bfloat16(), given(plain).npu().bfloat16()
    found, expected = model.part(x), QuarterGate.forward(model.part, x)
    assert torch.equal(found[2], expected[2])
    # softmax in float32 of the same logits; of others it would be off by 2**-9
    torch.testing.assert_close(spread(rule, found), spread(rule, expected), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_routers_of_other_numbers_of_experts_are_looked_at_for_themselves(registered) -> None:
    gates = nn.ModuleList([QuarterGate(), QuarterGate(24)]).to("npu")
    kernels_ext_npu.kernelize(gates)
    assert [model(torch.randn(3, WIDTH, device="npu"))[0].shape for model in gates] == [(3, 4), (3, 6)]
    assert [row.swapped for row in rows(gates, "routers")] == [True, True]


@torch.no_grad()
def test_what_is_given_beside_a_tensor_is_left_to_the_class(registered) -> None:
    model, plain, _ = made(QuarterGate)
    x = given(plain).npu()
    assert launched(lambda: model.part(x), OPERATORS) == 1
    assert launched(lambda: model.part(x, sort=True), OPERATORS) == 0


@torch.no_grad()
def test_rows_that_its_forward_takes_apart_by_their_width_are_left_to_that(registered) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 16)

        def forward(self, x):
            weights, experts = F.linear(x.view(-1, WIDTH), self.weight).softmax(-1).topk(2)
            return weights, experts

    model = kernels_ext_npu.kernelize(Block(Gate()).to("npu").eval())
    x = torch.randn(3, 2 * WIDTH, device="npu")
    assert said(model) == [("SoftmaxTopKRouter", True)]
    torch.testing.assert_close(model.part(x), Gate.forward(model.part, x), rtol=1e-5, atol=1e-6)


def test_groups_that_rarely_matter_are_seen(registered) -> None:
    class RareGroups(nn.Module):
        n_parts, parts_kept = 8, 7

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, WIDTH) / 4)

        def forward(self, x):
            parts = F.linear(x, self.weight).sigmoid().view(x.size(0), self.n_parts, -1)
            kept = parts.topk(2, dim=-1)[0].sum(-1).topk(self.parts_kept, dim=-1)[1]
            mask = torch.zeros_like(parts[..., 0]).scatter_(1, kept, 1).unsqueeze(-1)
            weights, experts = parts.masked_fill(mask == 0, float("-inf")).flatten(1).topk(1, dim=-1)
            return experts, weights

    torch.manual_seed(0)
    model = kernels_ext_npu.kernelize(Block(RareGroups()).to("npu"))
    assert said(model) == [("SigmoidTopKRouterUnbiased", True)]
    x = torch.randn(20_000, WIDTH, device="npu")
    found, expected = model.part(x)[0], RareGroups.forward(model.part, x)[0]
    best = F.linear(x, model.part.weight).argmax(-1, keepdim=True)
    assert 0 < (expected != best).sum() < 100
    assert torch.equal(found, expected)


@torch.no_grad()
def test_what_depends_on_the_width_is_tried_at_its_own(registered) -> None:
    class WideGate(Dispatcher):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(EXPERTS, 256) / 16)

        def forward(self, tokens):
            experts, weights = super().forward(tokens)
            return experts, weights * (tokens.shape[-1] / 64)

    model = kernels_ext_npu.kernelize(Block(WideGate()).to("npu").eval())
    x = torch.randn(3, 256, device="npu")
    assert said(model) == [("SoftmaxTopKRouter", True)]
    for mine, theirs in zip(model.part(x), WideGate.forward(model.part, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", LIKE_ROUTERS, ids=lambda cls: cls.__name__)
def test_what_only_looks_like_one_is_left_alone_with_the_reason(registered, cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu").eval())
    (row,) = rows(model, "routers")
    assert (row.kernel, row.swapped, row.is_candidate) == (None, False, False)
    assert LIKE_ROUTERS[cls] in row.reason
    assert "forward" not in vars(model.part)
