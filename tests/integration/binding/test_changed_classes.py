"""A class is given another forward, or a module another class, after the swap: that computes from the next call on."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.xlstm.modeling_xlstm import xLSTMRMSNorm

import kernels_ext_npu
from kernels_ext_npu.binding import forward_binding
from kernels_ext_npu.selftest.layers.moe_blocks_v4 import DeepseekV3MoE, Qwen3MoeSparseMoeBlock
from tests.fused_moe import expert_modules
from tests.support import zoo
from tests.support.nearness import TOLERANCE, assert_near
from tests.support.served import kernelized

pytestmark = pytest.mark.usefixtures("registered")

# what is swapped, or is a part of that; the others wait for a long run: each takes a second
PLACES = [
    ("qwen3", "Qwen3RMSNorm"),
    ("qwen3", "Qwen3MLP"),
    ("qwen3", "Qwen3RotaryEmbedding"),
    ("qwen3_moe", "Qwen3MoeTopKRouter"),
    ("qwen3_moe", "Qwen3MoeExperts"),
    ("llama4_text", "Llama4TextExperts"),  # these three are parts of what a kernel computes without a call of them
    ("dbrx", "DbrxExpertGLU"),
    ("ernie4_5_moe", "Ernie4_5_MoeStatics"),
    ("qwen3_next", "Qwen3NextGatedDeltaNet"),
    *(
        pytest.param(*place, marks=pytest.mark.long)
        for place in (
            ("gemma3_text", "Gemma3RMSNorm"),
            ("phi3", "Phi3MLP"),
            ("deepseek_v3", "DeepseekV3TopkRouter"),
            ("gpt_oss", "GptOssTopKRouter"),
            ("gpt_oss", "GptOssExperts"),
            ("qwen3_next", "Qwen3NextRMSNormGated"),
            ("bert", "BertSelfOutput"),
            ("gpt2", "NewGELUActivation"),
        )
    ),
]


def scaled(value: Any) -> Any:
    """Scale what a forward gives, or each of what it gives that is no index; not all alike, which a norm would undo."""
    if isinstance(value, tuple):
        return tuple(scaled(each) for each in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value * torch.linspace(0.75, 1.5, value.shape[-1], device=value.device, dtype=value.dtype)


def scaling(forward: Callable) -> Callable:
    @wraps(forward)  # as what measures or logs calls does
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return scaled(forward(self, *args, **kwargs))

    return changed


def modules_named(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules of a class; of linear layers, where some have adapters, these alone."""
    found = [module for module in model.modules() if type(module).__name__ == name]
    return [module for module in found if hasattr(module, "base_layer")] or found


@contextmanager
def class_forward(name: str, *models: nn.Module) -> Iterator[None]:
    """Give a class another forward."""
    (cls,) = {type(module) for model in models for module in modules_named(model, name)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "forward", scaling(cls.forward))
        yield


@contextmanager
def other_class(name: str, *models: nn.Module) -> Iterator[None]:
    """Give the modules of a class another class."""
    modules = [module for model in models for module in modules_named(model, name)]
    cls: Any = type(modules[0])

    class Changed(cls):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return scaled(super().forward(*args, **kwargs))

    for module in modules:
        module.__class__ = Changed
    yield
    for module in modules:
        module.__class__ = cls


@contextmanager
def own_forward(name: str, *models: nn.Module) -> Iterator[None]:
    """Give modules forwards of their own."""
    modules = [module for model in models for module in modules_named(model, name)]
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = MethodType(scaling(type(module).forward), module)  # type: ignore[method-assign]
    yield
    for module, forward in zip(modules, before, strict=True):
        del module.forward
        if forward is not None:
            module.forward = forward  # type: ignore[method-assign]


Change = Callable[..., AbstractContextManager[None]]
CHANGES: list[Change] = [class_forward, other_class, own_forward]


def output(model: nn.Module, name: str) -> Tensor:
    """Return what a model gives for inputs without padding."""
    plain = model.base_model.model if isinstance(model, PeftModel) else model
    return model(**{key: value for key, value in zoo.inputs(name, plain).items() if key != "attention_mask"})[0]


def assert_counts(
    change: Change,
    kind: str,
    models: Sequence[nn.Module],
    run: Callable[[nn.Module], Tensor],
    *looks: Callable[[nn.Module], object],
) -> None:
    """Change an original and a model with kernels: both give the same, in whichever way the latter is looked at."""
    original, model = models
    unchanged = run(original)
    assert_near(run(model), unchanged)
    with change(kind, *models):
        expected = run(original)
        assert (expected - unchanged).norm() > 100 * TOLERANCE * expected.norm()  # the change shows
        assert_near(run(model), expected)
        for look in looks:
            look(model)
            assert_near(run(model), expected)
    for look in looks[-1:]:
        look(model)
    assert_near(run(model), unchanged)


def train_without_dropout(model: nn.Module) -> None:
    model.train()
    nn.Module.train(model, False)  # transformers' own would look again


@pytest.mark.parametrize(("name", "kind"), PLACES)
def test_a_forward_that_a_class_gets_later_computes_from_the_next_call_on(subtests, name: str, kind: str) -> None:
    original = zoo.build(name)
    model = copy.deepcopy(original).to("npu")
    model.set_use_kernels(True)
    for change in CHANGES:
        with subtests.test(change.__name__), torch.no_grad():
            looks = train_without_dropout, kernels_ext_npu.restore, kernels_ext_npu.kernelize
            assert_counts(change, kind, (original, model), partial(output, name=name), *looks)


@pytest.mark.parametrize(("cls", "name"), [(GemmaRMSNorm, "_norm"), (xLSTMRMSNorm, "_rms_normalize")])
def test_a_helper_that_a_class_gets_later_computes_from_the_next_call_on(monkeypatch, cls: Any, name: str) -> None:
    """To 2e-6 of the norm, as float32 rounds."""
    plain, x = cls(32), torch.randn(2, 6, 32)
    model = kernels_ext_npu.kernelize(nn.ModuleDict({"part": copy.deepcopy(plain)}).to("npu"))
    (row,) = kernels_ext_npu.report(model)
    assert row.swapped
    helper = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, x: helper(self, x).flip(-1))
    expected = plain(x)
    assert (model["part"](x.npu()).cpu() - expected).norm() <= 2e-6 * expected.norm()
    (row,) = kernels_ext_npu.report(model)
    assert not row.swapped
    kernels_ext_npu.kernelize(model)
    assert "forward" not in vars(model["part"])
    monkeypatch.undo()
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert row.swapped


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["Qwen3RMSNorm", "Qwen3MLP"])
def test_a_graph_that_was_captured_before_is_captured_again(kind: str, change) -> None:
    torch._dynamo.reset()
    model = kernelized("qwen3")
    module = modules_named(model, kind)[0]
    original = kernels_ext_npu.restore(copy.deepcopy(module)).cpu()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, next(module.parameters()).shape[-1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_near(compiled(x.npu()), original(x))
        with change(kind, original, module):
            assert_near(compiled(x.npu()), original(x))
        assert_near(compiled(x.npu()), original(x))


def test_a_forward_that_a_class_gets_later_may_take_other_arguments() -> None:
    model = kernelized("qwen3")
    mlp: Any = model.model.layers[0].mlp
    x = torch.ones(1, 2, mlp.gate_proj.in_features, device="npu")
    expected = mlp(x)
    assert torch.equal(mlp(x=x), expected)  # by the name that its class has for it
    with pytest.raises(TypeError, match="scale"):
        mlp(x, scale=2)
    forward = type(mlp).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(mlp), "forward", lambda self, x, scale: scale * forward(self, x))
        assert_near(mlp(x, scale=2), 2 * expected)
        assert_near(mlp(x, 2), 2 * expected)


@pytest.mark.parametrize(
    ("cls", "change", "is_compiled"),
    [
        pytest.param(cls, change, is_compiled, marks=pytest.mark.long if is_compiled and change in CHANGES[1:] else ())
        for cls in (Qwen3MoeSparseMoeBlock, DeepseekV3MoE)
        for change in CHANGES
        for is_compiled in (False, True)
    ],
)
def test_changed_experts_in_a_list_are_called_one_by_one(cls: type[nn.Module], change, is_compiled: bool) -> None:
    torch._dynamo.reset()
    original = expert_modules.block(cls)
    model = kernels_ext_npu.kernelize(nn.ModuleDict({"block": copy.deepcopy(original)}).to("npu"))["block"]
    assert forward_binding.kernel_forward(model) is not None
    compiled = torch.compile(model, backend="eager")

    def run(block: nn.Module) -> Tensor:
        call = compiled if is_compiled and block is model else block
        found = call(expert_modules.block_inputs().to(next(block.parameters()).device))
        return found[0] if isinstance(found, tuple) else found

    assert_counts(change, type(original.experts[0]).__name__, (original, model), run)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: zoo.build("gemma", hidden_act="gelu_new"), "NewGELUActivation"),  # which a kernel serves too
        (lambda: zoo.build("qwen3_moe", hidden_act="gelu_new"), "NewGELUActivation"),
        (lambda: expert_modules.block(Qwen3MoeSparseMoeBlock), "SiLUActivation"),
    ],
    ids=["MLP", "experts", "experts in a list"],
)
def test_a_changed_activation_of_what_is_computed_at_once_is_called(change, made, name: str) -> None:
    original = made()
    model = copy.deepcopy(original).to("npu")
    for _ in range(2):  # at the second time its activation has a forward of a kernel
        kernels_ext_npu.kernelize(model)

    def run(module: nn.Module) -> Tensor:
        given = torch.arange(8)[None] if hasattr(module, "config") else expert_modules.block_inputs()
        found = module(given.to(next(module.parameters()).device))
        return found if isinstance(found, Tensor) else found[0]

    assert_counts(change, name, (original, model), run)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_with_adapters_are_called_one_by_one(change) -> None:
    """Queries, keys and values of a model that is trained are computed together otherwise."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], init_lora_weights=False)
    original = get_peft_model(zoo.build("qwen3"), config).eval()
    model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    assert_counts(change, "Linear", (original, model), partial(output, name="qwen3"), kernels_ext_npu.kernelize)


def test_a_wrapped_forward_of_layers_with_adapters_is_called_in_models_that_are_swapped_later() -> None:
    torch.manual_seed(0)
    original = get_peft_model(zoo.build("qwen3"), LoraConfig(target_modules=["o_proj"], init_lora_weights=False)).eval()
    with class_forward("Linear", original), torch.no_grad():
        model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
        assert_near(output(model, "qwen3"), output(original, "qwen3"))


@pytest.mark.parametrize(("name", "kind", "given"), [
    ("qwen3", "Qwen3RMSNorm", [3]),
    ("qwen3", "Qwen3MLP", [None]),
    ("qwen3", "Qwen3RotaryEmbedding", [torch.ones(1, 2, 64), None]),
    ("bert", "BertSelfOutput", [torch.ones(1, 2, 64), None]),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", [torch.ones(64)]),
])  # fmt: skip
def test_wrong_arguments_raise_the_error_of_the_original_class(name: str, kind: str, given: list[Any]) -> None:
    original, model = zoo.build(name), kernelized(name)
    with pytest.raises(Exception) as expected:  # noqa: PT011  whatever the class raises
        modules_named(original, kind)[0](*given)
    with pytest.raises(expected.type):
        modules_named(model, kind)[0](*[each.npu() if isinstance(each, Tensor) else each for each in given])
