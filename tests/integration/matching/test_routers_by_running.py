"""Routers of other people's code are served because of what they compute, in whatever words."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kernels_ext_npu
from tests.integration.matching.blocks import Block, launched, said
from tests.integration.matching.lookalike_routers import LIKE_ROUTERS
from tests.integration.matching.other_peoples_routers import (
    EXPERTS,
    ROUTERS,
    WIDTH,
    BestGroups,
    Dispatcher,
    GroupPicker,
    Inferring,
    LaterSoftmax,
    LightGate,
    NarrowGate,
    QuarterGate,
    Rule,
    SigmoidGate,
    Undivided,
)
from tests.support.served import rows

OPERATORS = "npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax"
CASES = pytest.mark.parametrize("cls", ROUTERS, ids=lambda cls: cls.__name__)


def made(cls: type[nn.Module]) -> tuple[Block, nn.Module, Rule]:
    """Make a block with kernels on the NPU, its plain router on the CPU, and what that is to compute."""
    torch.manual_seed(0)
    plain = cls().eval()
    return kernels_ext_npu.kernelize(Block(copy.deepcopy(plain)).to("npu")), plain, ROUTERS[cls]


def given(plain: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (10, WIDTH) if isinstance(plain, Inferring) else (2, 5, WIDTH)
    return torch.randn(shape).to(dtype)


def spread(rule: Rule, result: tuple[object, ...]) -> torch.Tensor:
    """Return the weights of all experts, ``[T, E]``, which say which are chosen too."""
    experts, weights = (result[place].flatten(0, -2).cpu() for place in rule.places)
    return torch.zeros(len(experts), EXPERTS, dtype=weights.dtype).scatter(1, experts.long(), weights)


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
    experts, weights = (result[place] for place in rule.places)
    (weights.double().cpu() * factors[experts.long().cpu()]).square().sum().backward()
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


@pytest.mark.parametrize("cls", [cls for cls, rule in ROUTERS.items() if rule.trains], ids=lambda cls: cls.__name__)
def test_in_training_it_is_served_if_it_computes_the_same_then(registered, cls: type[nn.Module]) -> None:
    model, plain, rule = made(cls)
    x = given(plain)
    model.train()
    assert said(model) == [(rule.layer, True)]
    torch.testing.assert_close(spread(rule, model.part(x.npu())).double(), rule.weights(plain, x), rtol=1e-5, atol=1e-6)


def test_in_training_a_loss_is_that_of_its_class(registered) -> None:
    model, plain, _ = made(LightGate)
    x = given(plain)
    assert model.part(x.npu())[2] == 0
    found, expected = model.train().part(x.npu())[2], plain.train()(x)[2]
    assert found.requires_grad
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    (row,) = (row for row in rows(model) if row.path == "part")
    assert not row.swapped
    assert "it is trained, and computes something else then" in row.reason
    assert said(model.eval()) == [("SoftmaxTopKRouter", True)]


def test_what_refuses_to_be_trained_refuses_it_still(registered) -> None:
    model, plain, _ = made(GroupPicker)
    with pytest.raises(AssertionError):
        model.train().part(given(plain).npu())


def test_where_its_class_has_no_gradient_it_has_none(registered) -> None:
    model, plain, _ = made(Inferring)
    x = given(plain).npu()
    assert launched(lambda: model.part(x), OPERATORS) == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.part(x)[0].sum().backward()
    with torch.no_grad():
        assert launched(lambda: model.part(x), OPERATORS) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("cls", "name", "value"), [(Dispatcher, "choices", 2), (SigmoidGate, "k", 3), (LightGate, "renorm", False)]
)
def test_another_setting_is_looked_at_again(registered, cls: type[nn.Module], name: str, value: int) -> None:
    model, plain, _ = made(cls)
    x = given(plain).npu()
    setattr(model.part, name, value)
    results: list[tuple] = []
    assert launched(lambda: results.append(model.part(x)), OPERATORS) == 0
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: results.append(model.part(x)), OPERATORS) == 1
    theirs, ours = (spread(ROUTERS[cls], result) for result in results)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_what_a_configuration_says_later_is_seen(registered) -> None:
    model, plain, _ = made(GroupPicker)
    model.part.conf.kept = 3
    x = given(plain).npu()
    assert launched(lambda: model.part(x), OPERATORS) == 0
    for mine, theirs in zip(model.part(x), GroupPicker.forward(model.part, x)):
        assert torch.equal(mine, theirs)


@torch.no_grad()
def test_in_a_dtype_whose_roundings_no_operator_has_its_class_computes(registered) -> None:
    model, plain, rule = made(NarrowGate)
    assert said(model) == [(rule.layer, True)]
    model, x = model.bfloat16(), given(plain).npu().bfloat16()
    assert launched(lambda: model.part(x), OPERATORS) == 0
    (row,) = (row for row in rows(model) if row.path == "part")
    assert not row.swapped
    assert "with a weight in torch.bfloat16 it is not known to round as the operator does" in row.reason


def test_groups_that_rarely_matter_are_seen(registered) -> None:
    class RareGroups(nn.Module):
        n_parts, parts_kept = 8, 7

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, WIDTH) / 4)

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


@torch.no_grad()
def test_biases_that_are_learned_later_are_read(registered) -> None:
    model, plain, rule = made(Undivided)
    x = given(plain)
    for part in (model.part, plain):
        part.correction += torch.arange(EXPERTS, device=part.correction.device) / 10
    torch.testing.assert_close(spread(rule, model.part(x.npu())).double(), rule.weights(plain, x), rtol=1e-5, atol=1e-6)


def test_a_linear_layer_is_called_with_what_its_class_calls_it_with(registered) -> None:
    model, plain, _ = made(LaterSoftmax)
    seen = []
    model.part.scorer.register_forward_hook(lambda module, args, result: seen.append((args[0].shape, args[0].dtype)))
    model.part(given(plain).npu())
    assert seen == [((10, WIDTH), torch.float32)]


def test_an_adapter_or_another_layer_in_the_place_of_a_linear_layer_is_called(registered) -> None:
    class Wide(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float() / 2

    model, plain, _ = made(LaterSoftmax)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["scorer"], r=4, init_lora_weights=False))
    x = given(plain).npu()
    for mine, theirs in zip(model.part(x), LaterSoftmax.forward(model.part, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert type(adapted.base_model.model.part.scorer) is not nn.Linear
    model.part.scorer = Wide(WIDTH, EXPERTS).to("npu")
    model, x = model.bfloat16(), x.bfloat16()
    for mine, theirs in zip(model.part(x), LaterSoftmax.forward(model.part, x), strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_under_autocast_its_class_computes(registered) -> None:
    model, plain, _ = made(BestGroups)
    x = given(plain).npu()
    with torch.no_grad(), torch.autocast("npu", torch.bfloat16):
        assert launched(lambda: model.part(x), OPERATORS) == 0


@torch.no_grad()
def test_it_is_taken_out(registered) -> None:
    model, plain, _ = made(Dispatcher)
    x = given(plain).npu()
    assert launched(lambda: model.part(x), OPERATORS) == 1
    kernels_ext_npu.restore(model)
    assert launched(lambda: model.part(x), OPERATORS) == 0
    assert "forward" not in vars(model.part)


@pytest.mark.parametrize("cls", LIKE_ROUTERS, ids=lambda cls: cls.__name__)
def test_what_only_looks_like_one_is_left_alone_with_the_reason(registered, cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu").eval())
    (row,) = rows(model, "routers")
    assert (row.kernel, row.swapped, row.is_candidate) == (None, False, False)
    assert LIKE_ROUTERS[cls] in row.reason
    assert "forward" not in vars(model.part)
