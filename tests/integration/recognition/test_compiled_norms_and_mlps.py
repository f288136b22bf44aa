"""torch.compile: what was recognised by running is traced with its kernel, and what was read of it is watched.

A graph computes what the class computes on the CPU. After a change the next call does what an eager one does.
"""

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kernels_ext_npu
from tests.integration.recognition import test_changed_settings
from tests.integration.recognition.blocks import OPERATORS, Block, launched, quickly
from tests.integration.recognition.spellings import other_peoples_norms
from tests.integration.recognition.spellings.other_peoples_layer_norms import (
    GATED_NORMS,
    Centred,
    GateFirst,
    OfHeads,
)
from tests.integration.recognition.spellings.other_peoples_longer_mlps import (
    AddingWhatIsLeft,
    ClampedBoth,
    DroppedInside,
    Dropping,
    DroppingInTheEnd,
    Scaling,
    T5Dense,
    Viewed,
)
from tests.integration.recognition.spellings.other_peoples_mlps import (
    ByConfig,
    ByFunction,
    ByLambda,
    ByModule,
    ByPartial,
    ByTableInForward,
    Config,
    MetaMLP,
    Packed,
)
from tests.integration.recognition.spellings.other_peoples_norms import (
    RMS_NORMS,
    WIDTH,
    DecoratedNorm,
    MetaNorm,
    NormOfConstants,
    OlmoNorm,
    PlainNorm,
    TupleNorm,
)
from tests.integration.recognition.test_changed_settings import Constants, NormOfAClass, NormOfALayout, NormOfANamespace
from tests.integration.recognition.test_recognised_norms_and_mlps import SERVED, TORCH_OPERATORS

# the others wait for a long run
QUICKLY = {MetaNorm, TupleNorm, Centred, GateFirst, MetaMLP, Packed, Dropping}
QUICK_CHANGES = {
    *("eps", "a member of the class", "what it looked for", "what nobody reads", "a parameter", "the forward"),
    *("a constant", "what a configuration says", "an activation", "a function", "a projection"),
}
# of two products the kernel computes no scaled unit in one launch
WITHOUT_OPERATOR = "ScaledSwiGLUMLP"


@pytest.fixture(autouse=True)
def from_the_beginning(registered: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=quickly(SERVED, QUICKLY), ids=lambda cls: cls.__name__)
def served(request) -> tuple[nn.Module, nn.Module]:
    """Two blocks with kernels on the NPU, and their plain twins on the CPU, which drop nothing out."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Block(request.param()) for _ in range(2)).eval()
    return kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu")), plain


def given(plain: nn.Module, length: int) -> list[torch.Tensor]:
    """Arguments of a module: those of a gated norm are two, and what is to be added is one."""
    part = plain[0].part
    shape = (2, length, 1, WIDTH) if isinstance(part, OfHeads) else (2, length, WIDTH)
    return [torch.randn(shape, requires_grad=True) for _ in range(1 + (type(part) in (*GATED_NORMS, AddingWhatIsLeft)))]


def test_all_layers_and_lengths_share_one_graph_with_the_operators_of_the_kernel(served) -> None:
    model, plain = served
    layer = SERVED[type(plain[0].part)]
    operators = (TORCH_OPERATORS[layer],) if layer in TORCH_OPERATORS else OPERATORS
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ours, theirs, length in zip((*model, *model), (*plain, *plain), (5, 9, 13, 5)):
            x = given(plain, length)
            moved = [each.detach().npu().requires_grad_() for each in x]
            found: list[torch.Tensor] = []
            count = launched(lambda: found.append(ours(*moved)), operators)  # noqa: B023  called at once
            assert count == (layer != WITHOUT_OPERATOR)
            expected = theirs(*x)
            # as where there is no graph: sums of float32 in another order
            torch.testing.assert_close(found[0].cpu(), expected, rtol=1e-5, atol=1e-5)
            gradients = torch.autograd.grad(found[0].square().sum(), [*moved, *ours.parameters()])
            truth = torch.autograd.grad(expected.square().sum(), [*x, *theirs.parameters()])
            for a, b in zip(gradients, truth, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)


class OfItsClass(MetaNorm):
    """Has a setting on its class, and looks for one that is not there."""

    has_offset = False

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.powers = None, (1, 2)

    def forward(self, x):
        gain = 1 + self.gain if self.has_offset else self.gain
        y = self._norm(x.float()).type_as(x) * gain * getattr(self, "factor", 1.0) * self.powers[0]
        return y if self.bias is None else y + self.bias


def put(name: str, value: object) -> Callable:
    return lambda patch, part: patch.setattr(part, name, value, raising=False)


def put_on_class(name: str, value: object) -> Callable:
    return lambda patch, part: patch.setattr(type(part), name, value)


def put_elsewhere(holder: object, name: str, value: object) -> Callable:
    return lambda patch, part: patch.setattr(holder, name, value)


def give_bias(patch: pytest.MonkeyPatch, part: nn.Module) -> None:
    part.bias = nn.Parameter(torch.ones(WIDTH, device=part.gain.device))


CHANGES = {
    "eps": (MetaNorm, put("epsilon", 0.5)),
    "eps of a decorated forward": (DecoratedNorm, put("epsilon", 0.5)),
    "a member in the place of one of the class": (OfItsClass, put("has_offset", True)),
    "a member of the class": (OfItsClass, put_on_class("has_offset", True)),
    "what it looked for": (OfItsClass, put("factor", 2.0)),
    "what nobody reads": (OfItsClass, put("note", 2.0)),
    "numbers in a tuple": (OfItsClass, put("powers", (3, 2))),
    "a list": (NormOfALayout, lambda patch, part: part.dims.append(-2)),
    "a dictionary": (NormOfALayout, lambda patch, part: part.factors.update({"of x": [0.01]})),
    "a list in a dictionary": (NormOfALayout, lambda patch, part: part.factors["of x"].insert(0, 0.01)),
    "a parameter": (OfItsClass, give_bias),
    "the forward": (OfItsClass, put_on_class("forward", lambda self, x: 3 * x)),
    "a constant": (NormOfConstants, put_elsewhere(other_peoples_norms, "EPSILON", 0.5)),
    "a constant of a class": (NormOfAClass, put_elsewhere(Constants, "EPSILON", 0.5)),
    "a member of a namespace": (NormOfANamespace, put_elsewhere(test_changed_settings.SETTINGS, "epsilon", 0.5)),
    "what a configuration says": (OlmoNorm, lambda patch, part: setattr(part.config, "eps", 0.5)),
    "a configuration": (ByConfig, put("config", Config(approximate="tanh"))),
    "an activation": (ByModule, put("activation", nn.ReLU())),
    "the forward of an activation": (ByModule, lambda patch, part: setattr(part.activation, "forward", torch.relu)),
    "a function": (ByFunction, put("act", F.gelu)),
    "a lambda": (ByLambda, put("act", F.silu)),
    "a partial function": (ByPartial, put("act", functools.partial(F.gelu, approximate="none"))),
    "a string": (ByTableInForward, put("act", "gelu")),
    "a projection": (ByModule, lambda patch, part: setattr(part, "w1", nn.Sequential(part.w1, nn.Tanh()))),
    "a factor": (Scaling, put("gate_scale", 2.0)),
    "a limit": (ClampedBoth, put("swiglu_limit", 0.2)),
}


@torch.no_grad()
@pytest.mark.parametrize("change", quickly(CHANGES, QUICK_CHANGES))
def test_after_a_change_the_next_call_computes_what_the_class_does(monkeypatch, change: str) -> None:
    cls, make = CHANGES[change]
    torch.manual_seed(0)
    plain = Block(cls()).eval()
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = 0.1 * torch.randn(2, 5, WIDTH)
    before = plain(x)
    # sums of float32 in another order
    torch.testing.assert_close(compiled(x.npu()).cpu(), before, rtol=1e-5, atol=1e-6)
    for block in (plain, model):
        make(monkeypatch, block.part)
    after = plain(x)
    assert (change == "what nobody reads") is torch.equal(after, before)
    torch.testing.assert_close(compiled(x.npu()).cpu(), after, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    "cls", quickly([Dropping, DroppedInside, DroppingInTheEnd, Viewed, T5Dense], {Dropping, T5Dense})
)
def test_dropouts_follow_the_mode(cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu")).eval()
    plain = kernels_ext_npu.restore(copy.deepcopy(model))
    compiled, x = torch.compile(model, backend="eager", fullgraph=True), torch.randn(2, 5, WIDTH, device="npu")
    for training in (False, True, False):
        results = []
        for call, module in ((compiled, model), (plain, plain)):
            module.train(training)
            torch.manual_seed(0)
            results.append(call(x))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        assert torch.equal(compiled(x), compiled(x)) is not training


@torch.no_grad()
@pytest.mark.parametrize("is_later", [False, True])
def test_who_watches_the_activation_sees_it(is_later: bool) -> None:
    """A hook that is put there later is seen where torch is asked to look for it."""
    model = kernels_ext_npu.kernelize(Block(ByModule()).to("npu"))
    compiled, x = torch.compile(model, backend="eager", fullgraph=True), torch.randn(2, 5, WIDTH, device="npu")
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=not is_later):
        if is_later:
            compiled(x)
        model.part.activation.register_forward_hook(lambda module, arguments, y: 2 * y)
        torch.testing.assert_close(compiled(x), ByModule.forward(model.part, x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_autocast_around_a_graph_is_seen() -> None:
    model = kernels_ext_npu.kernelize(Block(PlainNorm()).to("npu").bfloat16())
    compiled, x = (
        torch.compile(model, backend="eager", fullgraph=True),
        torch.randn(2, 5, WIDTH, device="npu").bfloat16(),
    )
    assert launched(lambda: compiled(x)) == 1
    with torch.autocast("npu", torch.bfloat16):
        assert launched(lambda: compiled(x)) == 0
    assert launched(lambda: compiled(x)) == 1


@torch.no_grad()
def test_modules_of_many_kinds_may_be_compiled_by_themselves() -> None:
    """Each has graphs of its own, of which torch makes no more than a few for one function."""
    kinds = list(RMS_NORMS)[: torch._dynamo.config.recompile_limit + 2]
    for cls in kinds:
        norm = kernels_ext_npu.kernelize(Block(cls()).to("npu")).part
        norm.compile(backend="eager", fullgraph=True)
        assert launched(lambda: norm(torch.randn(2, 5, WIDTH, device="npu"))) == 1  # noqa: B023  called at once


@torch.no_grad()
@pytest.mark.parametrize("cls", [MetaNorm, MetaMLP])
@pytest.mark.parametrize("exports", [False, True])
def test_a_graph_that_does_not_know_how_many_tokens_there_are_stays_whole(cls: type[nn.Module], exports: bool) -> None:
    """As where experts are computed one after the other: each gets the tokens that chose it."""

    class Some(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, places = torch.where(x[..., 0] > 0)
            return self.part(x[rows, places])

    plain, x = Some(cls()), torch.randn(2, 5, WIDTH)
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    if exports:
        with torch.enable_grad():
            compiled = torch.export.export(model, (x.npu(),), strict=False).module()
    else:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    for each in (x, -x, x.abs(), -x.abs()):
        torch.testing.assert_close(compiled(each.npu()).cpu(), plain(each), rtol=1e-5, atol=1e-5)
