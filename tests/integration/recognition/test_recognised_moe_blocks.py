"""Blocks with a list of experts are served because of what they compute, however they loop over them."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional as F

import kernels_ext_npu
from tests.integration.recognition.spellings.lookalike_moe_blocks import LIKE_MOE_BLOCKS, SERVED, HasAChooser, Like
from tests.integration.recognition.spellings.other_peoples_moe_blocks import (
    CHOSEN,
    MOE_BLOCKS,
    WIDTH,
    BalancingBlock,
    Chooser,
    Expert,
    KeepingBlock,
    RowsBlock,
    SigmoidBlock,
    SortingBlock,
)
from tests.support import npu_counts
from tests.support.served import rows

pytestmark = pytest.mark.usefixtures("registered")


def tokens(block: nn.Module) -> torch.Tensor:
    return torch.randn((10, WIDTH) if isinstance(block, RowsBlock) else (2, 5, WIDTH))


def steady_tokens(block: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Tokens whose experts do not depend on a rounding."""
    x = torch.randn(100, WIDTH).to(dtype)
    near = x * (1 + 16 * torch.finfo(dtype).eps * torch.randn_like(x))
    with torch.no_grad():
        batch = () if isinstance(block, RowsBlock) else (1,)
        y, z = (tensors(block(each.float().view(*batch, *each.shape)))[0].view(each.shape) for each in (x, near))
    is_steady = (y - z).norm(dim=-1) < 0.2 * y.norm(dim=-1)
    x = x[is_steady][:20]
    assert len(x) == 20
    return x if isinstance(block, RowsBlock) else x.view(2, 10, WIDTH)


def tensors(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [each for part in result for each in tensors(part)]


def in_a_model(block: nn.Module) -> nn.Module:
    return kernels_ext_npu.kernelize(nn.ModuleDict({"block": copy.deepcopy(block)}).to("npu"))


def find_row(model: nn.Module) -> kernels_ext_npu.Row:
    (row,) = [row for row in rows(model) if row.path == "block"]
    return row


def counted(call) -> dict[str, int]:
    npu_counts.reset()
    call()
    return npu_counts.read()


def is_at_once(model: nn.Module, x: torch.Tensor) -> bool:
    return "npu_grouped_matmul" in counted(lambda: model["block"](x))


@pytest.fixture(params=[(cls, mode) for cls in MOE_BLOCKS for mode in (True, False)], ids=str)
def plain(request) -> nn.Module:
    """A block of other people's code on the CPU, in training or not."""
    cls, is_trained = request.param
    torch.manual_seed(0)
    return cls().train(is_trained)


def test_all_experts_are_computed_at_once_and_the_host_does_not_wait(plain) -> None:
    """Its results and gradients are those of the block itself; of an expert without tokens they are zeros."""
    model = in_a_model(plain)
    row = find_row(model)
    assert (row.kernel, row.swapped, row.reason, row.kind) == ("GatedMoEBlock", True, None, "experts")
    x = tokens(plain)
    theirs, ours = x.clone().requires_grad_(), x.npu().requires_grad_()
    expected = tensors(plain(theirs))
    npu_counts.reset()
    found = tensors(model["block"](ours))
    counters = npu_counts.read()
    assert counters["npu_grouped_matmul"] == 2
    assert counters["stream_syncs"] == counters["device_to_host_copies"] == 0
    for results in (found, expected):
        sum(each.square().sum() for each in results if each.requires_grad).backward()
    for a, b in zip(found, expected, strict=True):  # sums of some products of float32 in another order
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(model["block"].named_parameters(), plain.parameters(), strict=True):
        zero = torch.zeros_like(b)
        grads = [zero if each.grad is None else each.grad.cpu() for each in (a, b)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_near_to_float64_as_the_block_itself(plain, dtype) -> None:
    rounded = copy.deepcopy(plain).to(dtype)
    x = steady_tokens(rounded.float(), dtype)
    model = in_a_model(rounded.to(dtype))
    with torch.no_grad():
        found, theirs = tensors(model["block"](x.npu()))[0], tensors(rounded(x))[0]
        truth = tensors(copy.deepcopy(rounded).float()(x.float()))[0].double()  # 2^-16 of a unit of 16 bits
    assert found.dtype is theirs.dtype
    ours, others = ((each.cpu().double() - truth).norm() for each in (found, theirs))
    # kernels round what experts give once more than a sum in float32 does: by half a unit
    assert ours <= others + torch.finfo(dtype).eps * truth.norm()


@pytest.mark.parametrize("cls", LIKE_MOE_BLOCKS, ids=lambda cls: cls.__name__)
def test_what_only_looks_like_one_is_left_alone(cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(nn.ModuleDict({"block": cls()}).to("npu"))
    assert not [row for row in rows(model) if row.path == "block" and row.swapped]
    assert "forward" not in vars(model["block"])


@pytest.mark.parametrize("cls", SERVED)
def test_what_they_look_like_is_served(cls: type[nn.Module]) -> None:
    assert find_row(in_a_model(cls())).swapped


@pytest.mark.parametrize("place", [0, 3])
def test_one_that_holds_the_experts_of_a_rank_is_told_from_one_that_holds_all(place: int) -> None:
    class OfARank(Like):
        def expert(self, number, x, weights):
            return 0 * x if self.experts[number] is None else super().expert(number, x, weights)

    plain = OfARank().eval()
    whole = in_a_model(plain)
    plain.experts[place] = None
    model, x = in_a_model(plain), torch.randn(2, 5, WIDTH)
    assert (find_row(whole).swapped, find_row(model).swapped) == (True, False)
    with torch.no_grad():
        torch.testing.assert_close(model["block"](x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)


def test_one_that_does_something_else_in_training_is_served_for_inference_alone() -> None:
    class Jittering(Like):
        def route(self, x):
            return super().route(x * torch.empty_like(x).uniform_(0.9, 1.1) if self.training else x)

    model, x = in_a_model(Jittering().eval()), torch.randn(2, 5, WIDTH, device="npu")
    assert find_row(model).reason.startswith("but not in training")
    assert is_at_once(model, x)
    assert not is_at_once(model.train(), x)


@pytest.mark.parametrize("change", ["setting", "gate", "expert", "hook", "fewer", "class"])
def test_a_later_change_is_computed(change: str, monkeypatch) -> None:
    torch.manual_seed(0)  # by which each expert has tokens
    plain = (SigmoidBlock if change in ("setting", "fewer") else SortingBlock)().eval()
    model, x, seen = in_a_model(plain), tokens(plain), []
    block = model["block"]
    assert is_at_once(model, x.npu())
    if change == "setting":
        plain.n_active = block.n_active = 2
    elif change == "gate":
        plain.chooser.bias[0] = block.chooser.bias[0] = 9.0  # a tensor that it reads: nothing is remembered of it
    elif change == "expert":
        for each in (plain, block):
            each.specialists[3] = nn.Linear(WIDTH, WIDTH, device=next(each.parameters()).device)
        block.specialists[3].load_state_dict(plain.specialists[3].state_dict())
    elif change == "hook":
        block.specialists[1].register_forward_hook(lambda *_: seen.append(1))
    elif change == "fewer":
        for each in (plain, block):
            each.experts.append(copy.deepcopy(each.experts[0]))
    else:
        monkeypatch.setattr(Expert, "forward", lambda self, x: self.w2(torch.relu(self.w1(x)) * self.w3(x)))
    with torch.no_grad():
        torch.testing.assert_close(block(x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)
        kernels_ext_npu.kernelize(model)
        torch.testing.assert_close(block(x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)
    assert bool(seen) is (change == "hook")


@pytest.mark.parametrize("change", ["one more", "one less", "forward", "hook"])
def test_children_beside_the_experts_that_change_are_computed(change: str) -> None:
    class Tapped(KeepingBlock):
        def __init__(self) -> None:
            super().__init__()
            self.act_fn = nn.Identity()

        def forward(self, x):
            return self.act_fn(super().forward(x))

    plain = Tapped().eval()
    model, x, seen = in_a_model(plain), tokens(plain), []
    assert is_at_once(model, x.npu())
    added = Expert()
    for each in (plain, model["block"]):
        if change == "one more":
            each.always.append(copy.deepcopy(added).to(x.device if each is plain else "npu"))
        elif change == "one less":
            each.always[0] = None
            each.always._modules.pop("0")
        elif change == "forward":
            each.act_fn.forward = torch.tanh
        else:
            each.act_fn.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        torch.testing.assert_close(model["block"](x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)
    assert len(seen) == (2 if change == "hook" else 0)


def test_adapters_on_experts_are_computed_and_the_report_says_so() -> None:
    plain = SortingBlock().eval()
    config = LoraConfig(target_modules=r".*specialists\.\d+\.w3", init_lora_weights=False)
    model, x = in_a_model(plain), tokens(plain)
    inject_adapter_in_model(config, model)
    adapted = kernels_ext_npu.restore(copy.deepcopy(model)).cpu()
    with torch.no_grad():
        torch.testing.assert_close(model["block"](x.npu()).cpu(), adapted["block"](x), rtol=1e-5, atol=1e-5)
    kernels_ext_npu.kernelize(model)
    with torch.no_grad():
        torch.testing.assert_close(model["block"](x.npu()).cpu(), adapted["block"](x), rtol=1e-5, atol=1e-5)


def test_it_is_taken_out_a_copy_keeps_it_and_the_weights_keep_their_names() -> None:
    plain = SortingBlock().eval()
    model, x = in_a_model(plain), tokens(plain).npu()
    twin = copy.deepcopy(model)
    kernels_ext_npu.restore(model)
    assert [is_at_once(each, x) for each in (model, twin)] == [False, True]
    assert list(twin["block"].state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(("cls", "name"), [(KeepingBlock, "load_loss"), (BalancingBlock, "balance")])
def test_a_loss_that_a_block_keeps_is_kept_and_has_its_gradient(cls: type[nn.Module], name: str) -> None:
    plain: nn.Module = cls().train()
    model, x = in_a_model(plain), tokens(plain)
    for _ in range(2):  # at the second call the attribute is there
        assert is_at_once(model, x.npu())
    theirs, ours = x.clone().requires_grad_(), x.npu().requires_grad_()
    plain(theirs)
    model["block"](ours)
    expected, found = (getattr(each, name) for each in (plain, model["block"]))
    expected.backward()
    found.backward()
    # sums of some products of float32 in another order
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)
    plain(x)
    with torch.no_grad():
        plain.eval()(x), model.eval()["block"](x.npu())
    expected, found = (getattr(each, name) for each in (plain, model["block"]))
    assert found is None if expected is None else not found.cpu().any() and found.shape == expected.shape


def test_a_loss_whose_weight_changes_is_that_of_the_block() -> None:
    plain = BalancingBlock().train()
    model, x = in_a_model(plain), tokens(plain)
    plain.loss_weight = model["block"].loss_weight = 0.5
    plain(x), model["block"](x.npu())
    torch.testing.assert_close(model["block"].balance.cpu(), plain.balance, rtol=1e-5, atol=1e-6)


def test_a_model_without_weights_is_served_too() -> None:
    with torch.device("meta"):
        model = kernels_ext_npu.kernelize(nn.ModuleDict({"block": SortingBlock()}))
    row = find_row(model)
    assert (row.kernel, row.swapped) == ("GatedMoEBlock", True)


def test_a_gate_that_draws_is_asked_at_each_call() -> None:
    class Drawing(Chooser):
        def forward(self, x):
            chosen, weights, _ = super().forward(x)
            return chosen, weights * torch.rand_like(weights), None

    class DrawingBlock(SortingBlock):
        def __init__(self) -> None:
            super().__init__()
            self.chooser = Drawing()

    model, x = in_a_model(DrawingBlock().eval()), torch.randn(2, 5, WIDTH, device="npu")
    assert is_at_once(model, x)
    assert not torch.equal(model["block"](x), model["block"](x))


@pytest.mark.parametrize(
    ("like", "seen"),
    [
        ("DispatchesByMasks", "no child, or several, give experts of tokens and their weights, or logits"),
        ("MoEOfPlainMLPs", "they are no gated MLPs that a kernel computes"),
        ("ProjectingMoE", "their projections are in several lists"),
        ("AddsAParameter", "what it gives is not the weighted sum of what they give"),
        ("TellsAnObject", "it reads LOADS of its file, an object that may change"),
    ],
)
def test_the_report_says_what_a_block_has_that_none_has_which_is_served(like: str, seen: str) -> None:
    (cls,) = (each for each in LIKE_MOE_BLOCKS if each.__name__ == like)
    row = find_row(in_a_model(cls()))
    assert (row.kernel, row.swapped, row.kind) == (None, False, "experts")
    assert row.reason == f"its experts are computed one after the other: {seen}"


def test_a_list_of_mlps_without_anything_that_chooses_is_no_block() -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(3))
            self.projection = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return sum(expert(self.projection(x)) for expert in self.experts)

    assert not [row for row in rows(in_a_model(Ensemble())) if row.path == "block"]


@pytest.mark.parametrize(("cls", "sums"), [(SortingBlock, 1), (KeepingBlock, 2)])
def test_it_takes_a_sum_for_each_expert_of_all_tokens(cls: type[nn.Module], sums: int) -> None:
    plain = cls().eval()
    model, x = in_a_model(plain), tokens(plain).npu()
    with torch.no_grad():
        found = counted(lambda: model["block"](x))
        gate = counted(lambda: model["block"].chooser(x))
    assert found["add"] - gate.get("add", 0) == sums


def test_a_loss_that_is_returned_has_no_dimension() -> None:
    class Returning(SortingBlock):
        def forward(self, x):
            return super().forward(x), self.chooser(x)[2]

    plain = Returning().train()
    model, x = in_a_model(plain), tokens(plain)
    found, expected = model["block"](x.npu())[1], plain(x)[1]
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_a_gate_that_is_a_linear_layer_itself_says_which_experts_it_chose() -> None:
    class Gate(nn.Linear):
        def forward(self, x):
            weights, chosen = super().forward(x).softmax(-1).topk(CHOSEN, -1)
            return chosen, weights, None

    class LinearBlock(HasAChooser):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate(WIDTH, len(self.experts), bias=False)

    plain = LinearBlock().eval()
    model, x = in_a_model(plain), tokens(plain)
    assert is_at_once(model, x.npu())
    with torch.no_grad():  # sums of some products of float32 in another order
        torch.testing.assert_close(model["block"](x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)


def test_the_report_says_why_a_block_computes_its_experts_one_after_the_other() -> None:
    class Remembering(Like):
        def end(self, y, x):
            self.load = y.abs().mean()
            return y

    row = find_row(in_a_model(Remembering()))
    assert (row.kernel, row.swapped, row.kind, row.reason.code) == (None, False, "experts", "unknown")
    seen = "it keeps or returns a number that is no loss which balances experts"
    assert row.reason == f"its experts are computed one after the other: {seen}"


class WideGate(Like):
    """Gives its gate float32, and lets no autocast narrow that."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.float()

    def route(self, x):
        with torch.autocast(x.device.type, enabled=False):
            weights, chosen = F.softmax(self.gate(x.float()), -1).topk(CHOSEN, -1)
        return weights.to(x.dtype), chosen


def test_a_gate_in_float32_gets_that() -> None:
    plain = WideGate().eval()
    plain.experts.bfloat16()
    x = steady_tokens(copy.deepcopy(plain).float(), torch.bfloat16)
    model = in_a_model(plain)
    assert is_at_once(model, x.npu())
    with torch.no_grad():  # of 16 bits, rounded apart
        torch.testing.assert_close(model["block"](x.npu()).cpu(), plain(x), rtol=2**-6, atol=2**-8)
        found: list[torch.dtype] = []
        model["block"].gate.register_forward_hook(lambda module, given, result: found.append(result.dtype))
        with torch.autocast("npu", torch.bfloat16):
            model["block"](x.npu())
    assert found == [torch.float32]
