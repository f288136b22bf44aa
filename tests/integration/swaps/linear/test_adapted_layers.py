"""peft's layers with adapters: served as one node, alone and with others of one input, and left to peft otherwise."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from tests.support.nearness import TOLERANCE

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOGETHER = "one node with q_proj, k_proj, v_proj"
X = torch.linspace(-1, 1, 64 * 16).view(2, 32, 16).sin()


class Attention(nn.Module):
    """Projections of one input, as transformers calls them, and one of what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 24), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o_proj = nn.Linear(24, 16, bias=False)

    def between(self, query: Tensor) -> Tensor:
        return query

    def forward(self, hidden_states: Tensor) -> Tensor:
        query = self.between(self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, 8))
        key = self.k_proj(hidden_states).tanh()
        value = self.v_proj(hidden_states)
        return self.o_proj((query * (key + value).unsqueeze(-2)).flatten(-2))


@pytest.fixture(autouse=True)
def _registered() -> None:
    kernels_ext_npu.register(kernels=["Linear"])


def pair(
    device: str = "cpu", dtype: torch.dtype = torch.float32, base: type[Attention] = Attention, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """An attention with adapters that has kernels, and the same as peft computes it, on a device."""
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "target_modules": NAMES, "init_lora_weights": False} | options)
    original = get_peft_model(base().to(dtype), config).train()
    return kernels_ext_npu.kernelize(copy.deepcopy(original).npu()), original.to(device)


def reasons(model: nn.Module) -> dict[str, str | None]:
    return {row.path.rpartition(".")[2]: row.reason for row in kernels_ext_npu.report(model).projections}


def step(call: Callable[..., Tensor], x: Tensor, base: nn.Module | None = None) -> dict[str, Tensor]:
    """What a call of a model gives, and the gradients of its weights."""
    model = call if base is None else base
    model.zero_grad(set_to_none=True)
    y = call(x)
    y.float().square().mean().backward()
    return {"": y.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, original: nn.Module, x: Tensor = X, tolerance: float = TOLERANCE) -> None:
    on = next(original.parameters()).device
    found, expected = step(model, x.npu()), step(original, x.to(on))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].cpu() - value.cpu()).norm() <= tolerance * value.cpu().norm().clamp(min=1e-6), name


def test_layers_with_adapters_are_one_node() -> None:
    model, original = pair()
    assert reasons(model) == {"q_proj": TOGETHER, "k_proj": TOGETHER, "v_proj": TOGETHER, "o_proj": None}
    assert {row.kernel for row in kernels_ext_npu.report(model).projections} == {"lora_linear"}
    assert_same(model, original)
    with Cost() as cost:
        step(model, X.npu())
    assert not cost.launches["copy_"]
    assert cost.launches["matmul_backward"] == 0
    with model.disable_adapter():
        assert "merged or switched off" in (reasons(model)["o_proj"] or "")
    assert_same(kernels_ext_npu.restore(model), original)
    assert not any("forward" in vars(module) for module in model.modules())


class Interrupted(Attention):
    """Draws random numbers between the calls of projections."""

    def between(self, query: Tensor) -> Tensor:
        return functional.dropout(query, 0.3, self.training)


class Reseeded(Attention):
    """Begins to draw anew between the calls of projections."""

    def between(self, query: Tensor) -> Tensor:
        torch.manual_seed(3)
        return query


def drawing_alike(
    model: nn.Module, original: nn.Module, act: Callable[[nn.Module], dict[str, Tensor]], tolerance: float = 1e-5
) -> None:
    """Compare what both compute from the same state of the generator, of which both have to draw as much."""
    found, offsets = [], []
    for each in (model, original):
        torch.manual_seed(1)
        found.append(act(each))
        offsets.append(torch.npu.default_generators[0].get_offset())
    assert offsets[0] == offsets[1] > 0
    assert found[0].keys() == found[1].keys()
    for name, value in found[1].items():
        assert found[0][name].dtype == value.dtype
        assert (found[0][name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [Attention, Interrupted, Reseeded])
def test_dropout_draws_what_peft_draws(base: type[Attention], dtype: torch.dtype) -> None:
    """The same numbers from the same generator: an element more or less would be a difference of a tenth.

    bfloat16: beside adapters of float32, a rounding in each of the layers, relative to the norm.
    """
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7
    model, original = pair("npu", dtype, base=base, lora_dropout=0.3)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert reasons(model) == dict.fromkeys(NAMES)  # each draws in its turn

    def two_steps(each: nn.Module) -> dict[str, Tensor]:
        first, second = (step(each, X.to(dtype).npu()) for _ in range(2))
        assert (first[""] - second[""]).norm() > 0.1 * first[""].norm() or base is Reseeded
        return first | {f"second {name}": value for name, value in second.items()}

    drawing_alike(model, original, two_steps, tolerance)
    assert set(reasons(model.eval()).values()) == {TOGETHER, None}
    assert_same(model, original.eval(), X.to(dtype), tolerance)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_checkpointing_is_that_of_peft(reentrant: bool) -> None:
    def checkpointed(each: nn.Module) -> dict[str, Tensor]:
        x = X.npu().requires_grad_()
        return step(lambda x: checkpoint(each, x, use_reentrant=reentrant), x, base=each) | {"x": x.grad}

    drawing_alike(*pair("npu", lora_dropout=0.3), checkpointed)


def test_dropout_of_another_kind_is_called() -> None:
    """One with a hook, and one of a class of its own: their layers are nodes by themselves."""

    class Other(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model, original = pair("npu", lora_dropout=0.3)
    for each in (model, original):
        base = each.base_model.model
        base.k_proj.lora_dropout["default"].register_forward_hook(lambda module, args, y: y * 2)
        base.o_proj.lora_dropout["default"] = Other(0.5)
    drawing_alike(model, original, lambda each: step(each, X.npu()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapted_layers_under_autocast_give_what_peft_gives(dtype: torch.dtype) -> None:
    """The tolerance is two roundings of bfloat16 in each of the layers."""

    def cast(each: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("npu", torch.bfloat16):
            return step(each, X.to(dtype).npu())

    drawing_alike(*pair("npu", dtype, lora_dropout=0.3), cast, 2.0**-6)


@pytest.mark.parametrize(("options", "reason"), [
    ({"use_dora": True}, "of another kind: DoraLinearVariant"),
    ({"lora_bias": True}, "its adapter default has a bias"),
])  # fmt: skip
def test_other_adapters_are_pefts_own(options: dict[str, Any], reason: str) -> None:
    model, original = pair(**options)
    assert all(reason in why for why in reasons(model).values())
    assert_same(model, original)


def test_what_is_trained_or_watched_beside_adapters_is_pefts_own() -> None:
    model, original = pair()
    for each in (model, original):
        base = each.base_model.model
        base.k_proj.base_layer.weight.requires_grad_(True)
        base.v_proj.lora_A["default"].register_forward_hook(lambda module, args, y: y * 2)
        base.o_proj.base_layer.register_forward_hook(lambda module, args, y: y + 1)
        base.q_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert_same(model, original)
    kernels_ext_npu.kernelize(model)
    found = reasons(model)
    assert "is trained, too" in found["k_proj"]
    assert "hooks watch its calls" in found["o_proj"]
    assert_same(model, original)


def test_a_chosen_adapter_for_each_row_is_pefts_own() -> None:
    model, original = pair()
    names = ["default", "__base__"]
    with torch.no_grad():
        found, expected = model.eval()(X.npu(), adapter_names=names), original.eval()(X, adapter_names=names)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_several_adapters_are_switched_off_and_scaled() -> None:
    """Merged and taken away they are in test_adapters.py."""
    model, original = pair()
    for each in (model, original):
        torch.manual_seed(2)
        each.add_adapter("other", LoraConfig(r=2, target_modules=NAMES, init_lora_weights=False, lora_alpha=3))
        each.to(next(each.parameters()).device)
        each.base_model.set_adapter(["default", "other"])
    for name, p in original.named_parameters():
        model.get_parameter(name).data.copy_(p.data)
    assert_same(model, original)
    for each in (model, original):
        each.base_model.set_adapter("other")
        for module in each.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(0.5)
    assert_same(model, original)
    with torch.no_grad(), model.disable_adapter(), original.disable_adapter():
        assert "merged or switched off" in (reasons(model)["o_proj"] or "")
        torch.testing.assert_close(model(X.npu()).cpu(), original(X), rtol=1e-4, atol=1e-5)
    assert_same(model, original)
