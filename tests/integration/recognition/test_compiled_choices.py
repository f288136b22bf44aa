"""torch.compile: routers, and blocks with experts in a list, are traced with their kernels, whatever lengths they get.

After a change the next call computes what the class does. A class that loops over its experts ends the graph.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import kernels_ext_npu
from tests.integration.recognition.blocks import launched, quickly
from tests.integration.recognition.router_blocks import OPERATORS, given, made, spread
from tests.integration.recognition.spellings.other_peoples_moe_blocks import (
    EXPERTS,
    INNER,
    MOE_BLOCKS,
    WIDTH,
    DenseBlock,
    Expert,
    RowsBlock,
    SigmoidBlock,
    SortingBlock,
)
from tests.integration.recognition.spellings.other_peoples_routers import EXPERTS as EXPERTS_TO_CHOOSE
from tests.integration.recognition.spellings.other_peoples_routers import (
    ROUTERS,
    BestGroups,
    GroupPicker,
    Inferring,
    LightGate,
    NarrowGate,
)
from tests.integration.recognition.test_recognised_moe_blocks import counted, in_a_model, tensors
from tests.support import npu_counts

# the others wait for a long run
QUICKLY = {(SortingBlock, True)}
QUICK_CHANGES = {"how many", "the forward of experts", "the mode"}
QUICK_ROUTERS = {GroupPicker, NarrowGate}


def named(case: object) -> str:
    return " ".join(getattr(part, "__name__", str(part)) for part in (case if isinstance(case, tuple) else (case,)))


@pytest.fixture(autouse=True)
def from_the_beginning(registered: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(block: nn.Module, length: int) -> torch.Tensor:
    return torch.randn((length, WIDTH) if isinstance(block, RowsBlock) else (2, length, WIDTH))


@pytest.mark.parametrize("case", quickly(itertools.product(MOE_BLOCKS, (True, False)), QUICKLY), ids=named)
def test_a_block_is_one_graph_for_all_layers_and_lengths(case: tuple[type[nn.Module], bool]) -> None:
    cls, is_trained = case
    torch.manual_seed(0)
    plain = nn.ModuleList(cls() for _ in range(2)).train(is_trained)
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    for block, theirs in zip(model, plain, strict=True):
        block(tokens(theirs, 5).npu())  # what a block keeps is a member from its first call on
        block.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ours, theirs, length in zip((*model, *model), (*plain, *plain), (5, 9, 13, 5)):
            x = tokens(theirs, length).requires_grad_()
            moved = x.detach().npu().requires_grad_()
            expected = tensors(theirs(x))
            npu_counts.reset()
            found = tensors(ours(moved))
            counters = npu_counts.read()
            assert counters["npu_grouped_matmul"] == 3  # a compiler does not see that gate and up lie side by side
            assert counters["stream_syncs"] == counters["device_to_host_copies"] == 0
            for a, b in zip(found, expected, strict=True):  # sums of some products of float32 in another order
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
            gradients = [
                torch.autograd.grad(each[0].square().sum(), [y, *block.parameters()], materialize_grads=True)
                for each, y, block in ((found, moved, ours), (expected, x, theirs))
            ]
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)


class LlamaBlock(SigmoidBlock):
    """Has experts that a pattern knows."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(EXPERTS))


def other_forward(cls: type[nn.Module]) -> Callable:
    return lambda patch, block: patch.setattr(cls, "forward", lambda self, x: 2 * x)


def double(patch: pytest.MonkeyPatch, block: nn.Module) -> None:
    block.experts[2].forward = MethodType(lambda self, x: 2 * x, block.experts[2])


def put_relu(patch: pytest.MonkeyPatch, block: nn.Module) -> None:
    block.experts[2].act_fn = nn.ReLU()


def put_formula(patch: pytest.MonkeyPatch, block: nn.Module) -> None:
    block.experts[2].act.approximate = "none"


def put_linear(patch: pytest.MonkeyPatch, block: nn.Module) -> None:
    torch.manual_seed(1)
    block.specialists[3] = nn.Linear(WIDTH, WIDTH).to(block.chooser.bias.device)


CHANGES = {
    "how many": (SigmoidBlock, lambda patch, block: setattr(block, "n_active", 2), 0),
    "a bias of the gate": (SortingBlock, lambda patch, block: block.chooser.bias.__setitem__(0, 9.0), 3),
    "an expert": (SortingBlock, put_linear, 0),
    "one expert less": (DenseBlock, lambda patch, block: block.experts.pop(-1), 0),
    "the forward of experts": (SortingBlock, other_forward(Expert), 0),
    "the forward of experts that a pattern knows": (LlamaBlock, other_forward(LlamaMLP), 0),
    "the forward of one expert": (SigmoidBlock, double, 0),
    "the forward of one expert that a pattern knows": (LlamaBlock, double, 0),
    "the activation of one expert": (LlamaBlock, put_relu, 0),
    "the formula of an activation": (
        DenseBlock,
        lambda patch, block: setattr(block.experts[2].act, "approximate", "none"),
        0,
    ),
    "the mode": (SortingBlock, lambda patch, block: block.train(), 2),
    "the forward of the block": (SigmoidBlock, other_forward(SigmoidBlock), 0),
}


@torch.no_grad()
@pytest.mark.parametrize("change", quickly(CHANGES, QUICK_CHANGES))
def test_after_a_change_of_a_block_the_next_call_computes_what_its_class_does(monkeypatch, change: str) -> None:
    cls, make, products = CHANGES[change]
    torch.manual_seed(0)
    plain = cls().eval()
    block = in_a_model(plain)["block"]
    compiled, x = torch.compile(block, backend="eager"), tokens(plain, 5)
    assert counted(lambda: compiled(x.npu()))["npu_grouped_matmul"] == 3
    before = plain(x)
    for each in (plain, block):
        make(monkeypatch, each)
    after = plain(x)
    assert change == "the mode" or not torch.equal(after, before)
    results: list[torch.Tensor] = []
    with torch.compiler.set_stance("eager_on_recompile"):  # the loops of classes make many graphs
        counters = counted(lambda: results.append(compiled(x.npu())))
    assert counters.get("npu_grouped_matmul", 0) == products
    torch.testing.assert_close(results[0].cpu(), after, rtol=1e-5, atol=1e-5)  # of float32 in another order


@pytest.mark.parametrize("cls", quickly(ROUTERS, QUICK_ROUTERS), ids=named)
def test_a_router_is_one_graph_for_all_lengths(cls: type[nn.Module]) -> None:
    model, plain, rule = made(cls)
    compiled = torch.compile(model.part, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for length in (5, 9, 13):
            x = torch.cat([given(plain)] * length, -2)
            results: list[tuple] = []
            assert launched(lambda: results.append(compiled(x.npu())), OPERATORS) == 1  # noqa: B023  called at once
            torch.testing.assert_close(spread(rule, results[0]).double(), rule.weights(plain, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", quickly([cls for cls in ROUTERS if cls is not Inferring], QUICK_ROUTERS), ids=named)
def test_the_gradient_of_a_compiled_router_is_that_of_its_formula(cls: type[nn.Module]) -> None:
    model, plain, rule = made(cls)
    compiled, x = torch.compile(model.part, backend="aot_eager", fullgraph=True), given(plain)
    theirs, ours = x.clone().requires_grad_(), x.npu().requires_grad_()
    factors = torch.randn(10, EXPERTS_TO_CHOOSE)
    (spread(rule, compiled(ours)) * factors).sum().backward()
    (rule.weights(plain, theirs) * factors).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)  # float32 against float64


ROUTER_CHANGES = {
    "a configuration": (GroupPicker, lambda part: setattr(part.conf, "per_tok", 3)),
    "a number": (BestGroups, lambda part: setattr(part, "factor", 2.0)),
    "the dtype": (NarrowGate, lambda part: part.bfloat16()),
    "the mode": (LightGate, lambda part: part.train()),
}


@torch.no_grad()
@pytest.mark.parametrize("change", quickly(ROUTER_CHANGES, {"a configuration", "the dtype"}))
def test_after_a_change_of_a_router_the_next_call_computes_what_its_class_does(change: str) -> None:
    cls, make = ROUTER_CHANGES[change]
    model, plain, _ = made(cls)
    compiled, x = torch.compile(model.part, backend="eager", fullgraph=True), given(plain).npu()
    assert launched(lambda: compiled(x), OPERATORS) == 1
    make(model.part)
    x, results = x.to(next(model.parameters()).dtype), []
    assert launched(lambda: results.append(compiled(x)), OPERATORS) == 0
    for found, expected in zip(results[0], cls.forward(model.part, x), strict=True):
        assert torch.equal(found, expected)
