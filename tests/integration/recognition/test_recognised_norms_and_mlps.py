"""Norms and gated MLPs of other people's code are served because of what they compute, in whatever words."""

import copy
import inspect
import warnings

import peft
import pytest
import torch
from torch import nn

import kernels_ext_npu
import softnpu
from tests.integration.recognition.blocks import OPERATORS, Block, launched, said
from tests.integration.recognition.spellings import other_peoples_norms
from tests.integration.recognition.spellings.lookalike_mlps import LIKE_MLPS, PackedUpFirst
from tests.integration.recognition.spellings.lookalike_norms import LIKE_NORMS
from tests.integration.recognition.spellings.other_peoples_layer_norms import (
    ACTIVATIONS,
    GATED_NORMS,
    LAYER_NORMS,
    GateFirst,
    OfHeads,
    SwishBehind,
)
from tests.integration.recognition.spellings.other_peoples_longer_mlps import (
    LONGER_MLPS,
    AddingWhatIsLeft,
    DroppedInside,
    Dropping,
    DroppingInTheEnd,
    Viewed,
)
from tests.integration.recognition.spellings.other_peoples_mlps import (
    INNER,
    PLAIN_MLPS,
    Helped,
    MetaMLP,
    MLPOfRows,
    Packed,
)
from tests.integration.recognition.spellings.other_peoples_norms import (
    RMS_NORMS,
    WIDTH,
    DecoratedNorm,
    GainOfThreeDimensions,
    MetaNorm,
    NormOfConstants,
    NormOfHeads,
    NormOfThreeDimensions,
    ResidualNorm,
    UnitLengthNorm,
)
from tests.support.served import rows

SERVED = RMS_NORMS | LAYER_NORMS | GATED_NORMS | ACTIVATIONS | PLAIN_MLPS | LONGER_MLPS
TORCH_OPERATORS = {
    **dict.fromkeys(("LayerNorm", "LayerNormFloat32"), "native_layer_norm"),
    **dict.fromkeys(("NewGELU", "FastGELU"), "gelu"),
}


@pytest.fixture(params=SERVED, ids=lambda cls: cls.__name__)
def served(request, registered) -> tuple[Block, Block]:
    """A block with kernels on the NPU, and its plain twin on the CPU, which drop nothing out."""
    torch.manual_seed(0)
    plain = Block(request.param()).eval()
    return kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu")), plain


def given(plain: Block, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Arguments of a module: those of a gated norm are two, and what is to be added is one."""
    shape = (2, 5, 1, WIDTH) if isinstance(plain.part, OfHeads) else (2, 5, WIDTH)
    return [torch.randn(shape).to(dtype) for _ in range(1 + (type(plain.part) in (*GATED_NORMS, AddingWhatIsLeft)))]


def test_it_is_served_by_the_layer_that_computes_the_same(served) -> None:
    model, plain = served
    x = given(plain)
    assert said(model) == [(SERVED[type(plain.part)], True)]
    operators = TORCH_OPERATORS.get(SERVED[type(plain.part)])
    assert launched(lambda: model(*(each.npu() for each in x)), (operators,) if operators else OPERATORS) == 1
    # sums of float32 in another order
    torch.testing.assert_close(model(*(each.npu() for each in x)).cpu(), plain(*x), rtol=1e-5, atol=1e-5)


WITHOUT_CASTS = [
    cls for cls in SERVED if cls.__name__ in ("PlainNorm", "UnitLengthNorm", "Centred", "FusedMomentsLayerNorm")
]


@pytest.mark.parametrize("served", [*WITHOUT_CASTS, MetaNorm, MetaMLP], indirect=True)
def test_under_autocast_it_gives_what_its_class_gives_there(served) -> None:
    """On the NPU, whose autocast has operators of its own; those without casts give what autocast makes of them."""
    model, plain = served[0].bfloat16(), served[1].bfloat16().to("npu")
    x = [each.to("npu") for each in given(plain, torch.bfloat16)]
    with torch.no_grad(), torch.autocast("npu", torch.bfloat16):
        found, expected = model(*x), plain(*x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2**-6)  # of 16 bits, rounded apart


def products(call) -> int:
    softnpu.reset_counters()
    call()
    return sum(count for name, count in softnpu.counters().items() if name in ("mm", "addmm", "linear", "matmul"))


def test_gate_and_up_are_one_product(registered) -> None:
    model = Block(MetaMLP()).to("npu")
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert products(lambda: model(x)) == 3
    kernels_ext_npu.kernelize(model)
    assert products(lambda: model(x)) == 2


def test_its_gradients_are_those_of_its_own_forward(served) -> None:
    model, plain = served
    theirs = [each.requires_grad_() for each in given(plain)]
    ours = [each.detach().npu().requires_grad_() for each in theirs]
    model(*ours).square().sum().backward()
    plain(*theirs).square().sum().backward()
    for mine, other in zip(ours, theirs):  # of sums of a hundred squares
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)
    for mine, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_near_to_float64_as_its_own_forward(served, dtype) -> None:
    model, plain = served
    x = given(plain, dtype)
    model, rounded = model.to(dtype), copy.deepcopy(plain).to(dtype)
    truth = copy.deepcopy(rounded).double()(*(each.double() for each in x))
    results = model(*(each.npu() for each in x)).cpu(), rounded(*x)
    assert results[0].dtype is results[1].dtype
    ours, theirs = (result.double() - truth for result in results)
    # kernels round once, at the end: by half a unit at most
    assert ours.norm() <= theirs.norm() + torch.finfo(dtype).eps / 2 * truth.norm()


@pytest.mark.parametrize("cls", [*LIKE_NORMS, *LIKE_MLPS], ids=lambda cls: cls.__name__)
def test_what_only_looks_like_one_is_left_alone(registered, cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu"))
    assert all(not swapped for _, swapped in said(model))
    assert "forward" not in vars(model.part)


def test_what_its_author_compiles_is_served_too(registered) -> None:
    class Compiled(Packed):
        forward = torch.compile(Packed.forward, backend="eager")

    model = kernels_ext_npu.kernelize(Block(Compiled()).to("npu"))
    assert said(model) == [("FusedSwiGLUMLP", True)]
    assert launched(lambda: model(torch.randn(2, 5, WIDTH, device="npu"))) == 1


def test_a_setting_that_a_decorated_forward_reads_is_watched(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(DecoratedNorm()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    model.part.epsilon = 1.0
    torch.testing.assert_close(model(x), DecoratedNorm.forward(model.part, x))


def test_constants_of_its_file_are_watched(registered, monkeypatch) -> None:
    model = kernels_ext_npu.kernelize(Block(NormOfConstants()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    monkeypatch.setattr(other_peoples_norms, "EPSILON", 1.0)
    torch.testing.assert_close(model(x), NormOfConstants.forward(model.part, x))
    assert launched(lambda: kernels_ext_npu.kernelize(model)(x)) == 1


def test_a_row_of_zeros_stays_one_where_the_length_is_limited(registered) -> None:
    x = torch.randn(3, WIDTH)
    x[1] = 0
    ours, theirs = x.npu().requires_grad_(), x.requires_grad_()
    model = kernels_ext_npu.kernelize(UnitLengthNorm().to("npu"))
    for norm, given in ((model, ours), (UnitLengthNorm(), theirs)):
        result = norm(given)
        assert not result[1].any()
        result.sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)  # sums of float32


@pytest.mark.parametrize("cls", [NormOfThreeDimensions, GainOfThreeDimensions])
def test_a_weight_with_more_dimensions_than_what_it_scales_adds_them(registered, cls) -> None:
    model, x = kernels_ext_npu.kernelize(Block(cls()).to("npu")), torch.randn(5, WIDTH)
    torch.testing.assert_close(model(x.npu()).cpu(), cls()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [NormOfHeads, MLPOfRows])
def test_what_its_forward_takes_apart_by_its_width_is_left_to_that(registered, cls: type[nn.Module]) -> None:
    plain = Block(cls()).eval()
    model, x = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu")), torch.randn(2, 5, 3 * WIDTH)
    assert said(model) == [("RMSNorm" if cls is NormOfHeads else "SwiGLUMLP", True)]
    with torch.no_grad():
        torch.testing.assert_close(model(x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)


def test_of_a_gate_that_no_operator_takes_the_report_says_so(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(PackedUpFirst()).to("npu"))
    (row,) = (row for row in rows(model, "gated MLPs") if row.path == "part")
    assert row.kernel is None
    assert row.reason.code == "no operator"


@pytest.mark.parametrize(
    ("like", "seen"),
    [
        ("EpsOutside", "no known norm over the last dimension with an eps inside"),
        ("DetachedMean", "its gradients"),
        ("NotInHalf", "it rounds where no kernel does"),
        ("OneOperator", "torch's layer norm is one operator already"),
        ("OneOperatorWithoutBias", "torch's layer norm is one operator already"),
        ("Dropping", "it calls empty_like"),
        ("Counting", "it writes to"),
        ("ReluGated", "it is gated by another function than SiLU or GELU"),
        ("GluGated", "it is gated by another function than SiLU or GELU"),
        ("SigmoidGated", "it is gated by another function than SiLU or GELU"),
        ("QuickGated", "no product of a projection and of SiLU or GELU"),
        ("ByLength", "it asks for sizes"),
        ("OtherwiseInHalf", "it computes otherwise in float16"),
        ("DroppedInTrainingBranch", "it computes otherwise in training"),
        ("HalvedGradient", "its gradients are other ones"),
        ("ClampedThrice", "it clamps in another way"),
    ],
)
def test_the_report_says_what_one_was_seen_to_do_that_no_kernel_does(registered, like: str, seen: str) -> None:
    (cls,) = (each for each in (*LIKE_NORMS, *LIKE_MLPS) if each.__name__ == like)
    named = type(f"{like}{'Norm' if cls in LIKE_NORMS else 'MLP'}", (cls,), {})  # others are reported if they are near
    model = kernels_ext_npu.kernelize(Block(named()).to("npu"))
    (row,) = (row for row in rows(model) if row.path == "part")
    assert row.reason.code == "unknown"
    assert seen in row.reason


def test_the_report_names_a_member_that_is_no_setting(registered) -> None:
    class Steps:
        eps = 1e-6

    class ByStepsNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.steps = nn.Parameter(torch.ones(WIDTH)), Steps()

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.steps.eps)

    (row,) = (row for row in rows(kernels_ext_npu.kernelize(Block(ByStepsNorm()).to("npu"))) if row.path == "part")
    assert row.reason.endswith("it reads self.steps, no number, text or function")


@pytest.mark.parametrize(
    ("like", "kind"),
    [("NotInHalf", "norms"), ("DetachedMean", "norms"), ("OfFixedHalves", "gated MLPs"), ("ReluGated", "gated MLPs")],
)
def test_one_that_is_nearly_served_is_reported_whatever_its_name(registered, like: str, kind: str) -> None:
    (cls,) = (each for each in (*LIKE_NORMS, *LIKE_MLPS) if each.__name__ == like)
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu"))
    (row,) = (row for row in rows(model) if row.path == "part")
    assert (row.kind, row.swapped) == (kind, False)


def test_adapters_that_are_put_on_it_later_are_computed(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(Helped()).to("npu"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["w1", "w2", "w3"], r=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    plain = kernels_ext_npu.restore(copy.deepcopy(adapted))
    x = torch.randn(2, 5, WIDTH, device="npu")
    torch.testing.assert_close(adapted(x), plain(x), rtol=1e-5, atol=1e-4)  # of sums of some hundred numbers
    kernels_ext_npu.kernelize(adapted)
    torch.testing.assert_close(adapted(x), plain(x), rtol=1e-5, atol=1e-4)


def test_it_is_taken_out_and_a_copy_keeps_it(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(MetaMLP()).to("npu"))
    twin = copy.deepcopy(model)
    x = torch.randn(2, 5, WIDTH, device="npu")
    kernels_ext_npu.restore(model)
    assert launched(lambda: model(x)) == 0
    assert launched(lambda: twin(x)) == 1
    assert torch.equal(twin(x), kernels_ext_npu.kernelize(model)(x))


def test_a_model_without_weights_is_served_too(registered) -> None:
    with torch.device("meta"):
        model = kernels_ext_npu.kernelize(Block(MetaMLP()))
    assert said(model) == [("SwiGLUMLP", True)]
    assert model.part.w1.weight.is_meta
    assert model.part.w1.out_features == INNER


def test_what_surrounds_a_model_is_neither_seen_nor_changed(registered) -> None:
    class Norm(MetaNorm):
        """A class that no other test has made known."""

    class MLP(MetaMLP):
        """The same."""

    state, npu_state = torch.get_rng_state(), torch.npu.get_rng_state()
    with torch.device("meta"), torch.inference_mode():
        blocks = [kernels_ext_npu.kernelize(Block(part())) for part in (Norm, MLP)]
    assert [said(block)[0][1] for block in blocks] == [True, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.npu.get_rng_state(), npu_state)


def test_a_child_with_nothing_but_tables_stands_in_no_way(registered) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.angles = MetaNorm(), nn.Module()
            self.angles.register_buffer("table", torch.randn(4, WIDTH), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.angles.table

    model = kernels_ext_npu.kernelize(Attention().to("npu"))
    assert [(row.path, row.kernel) for row in rows(model) if row.swapped] == [("norm", "RMSNorm")]


def test_a_module_without_numbers_that_is_there_for_something_else_is_not_run(registered) -> None:
    calls = []

    class Recording(nn.Module):
        def forward(self, x):
            calls.append(x.shape)
            return x

    kernels_ext_npu.report(kernels_ext_npu.kernelize(Block(Recording()).to("npu")))
    assert not calls


def test_a_model_is_reported_once_kernels_are_unregistered(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(Helped()).to("npu"))
    kernels_ext_npu.unregister()
    assert said(model) == [("SwiGLUMLP", True)]
    kernels_ext_npu.restore(model)
    assert said(model) == [("SwiGLUMLP", False)]


@pytest.mark.parametrize("cls", [DroppedInside, Dropping, Viewed, DroppingInTheEnd])
def test_dropouts_draw_what_they_draw_in_the_forward_of_the_class(registered, cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu")).train()
    plain = kernels_ext_npu.restore(copy.deepcopy(model))
    x = torch.randn(2, 5, WIDTH, device="npu")
    results = []
    for each in (model, plain):
        torch.manual_seed(0)
        results.append(each(x))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("cls", [MetaNorm, MetaMLP])
def test_a_nested_tensor_is_left_to_the_class(registered, cls: type[nn.Module]) -> None:
    plain, parts = Block(cls()), [torch.randn(length, WIDTH) for length in (3, 5)]
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    given = torch.nested.nested_tensor([part.npu() for part in parts], layout=torch.jagged)
    with pytest.warns(UserWarning, match="its operator is not for tensors of this kind"):
        found = model(given)
    torch.testing.assert_close(found.values().cpu(), plain(torch.cat(parts)), rtol=1e-5, atol=1e-5)


def test_what_is_given_beside_a_tensor_is_left_to_the_class(registered) -> None:
    model = kernels_ext_npu.kernelize(ResidualNorm().to("npu"))
    x, residual = torch.randn(2, 2, 5, WIDTH, device="npu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launched(lambda: model(x)) == launched(lambda: model(x=x)) == 1
        for call in (lambda: model(x, residual), lambda: model(x, residual=residual)):
            assert launched(call) == 0
            torch.testing.assert_close(call(), ResidualNorm.forward(model, x, residual))


@pytest.mark.parametrize("cls", [SwishBehind, GateFirst])
def test_a_gated_norm_does_without_a_gate_what_its_class_does(registered, cls: type[nn.Module]) -> None:
    x, z = torch.randn(2, 2, 5, WIDTH, device="npu")
    model = kernels_ext_npu.kernelize(cls().to("npu"))
    assert launched(lambda: model(x)) == 1
    torch.testing.assert_close(model(x), cls.forward(model, x), rtol=1e-5, atol=1e-5)
    name = list(inspect.signature(cls.forward).parameters)[2]
    torch.testing.assert_close(model(x, **{name: z}), cls.forward(model, x, z), rtol=1e-5, atol=1e-5)
