"""Every gated MLP of transformers on the software device: the values and gradients of its own forward."""

import copy
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.matching.classification import UNSUPPORTED
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.patterns.mlps.gated_mlps import LlamaMLP
from tests.support.counted import counted
from tests.support.mlp_classes import ARGUMENTS, inputs, instance, is_served
from tests.support.transformers_files import classes, differing

pytestmark = pytest.mark.usefixtures("registered")
SILU_ONLY = ("ClampedSwiGLUMLP", "ScaledSwiGLUMLP")
UNITS = {"npu_swiglu", "npu_geglu", "npu_clipped_swiglu"}


@cache
def served() -> list[type[nn.Module]]:
    return [cls for cls in classes(MLPS) if is_served(cls)]


def named(name: str) -> type[nn.Module]:
    return next(cls for cls in served() if cls.__name__ == name)


def swapped(module: nn.Module) -> nn.Module:
    """A copy on the device, with its kernel."""
    model = nn.ModuleDict({"mlp": copy.deepcopy(module)}).to("npu")
    row, *_ = [row for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(model)) if row.path == "mlp"]
    assert row.swapped, row.reason
    return model["mlp"]


def results(module: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    """The result, and the gradients of argument, weights and biases."""
    leaf = x.detach().requires_grad_()
    y = (call or module)(leaf, **ARGUMENTS.get(type(module).__name__, {}))
    module.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    """Over all but gradients of single numbers: these are sums that all but cancel."""
    parts = [(a.cpu().double() - c).norm() / c.norm() for a, c in zip(found, truth) if c.numel() > 1]
    return torch.stack(parts).norm().item()


def limit_apart(module: nn.Module, x: Tensor) -> None:
    """Set a limit, where there is one, in the widest gap of what it clamps: no rounding decides on a gradient then."""
    name = next((name for name in ("limit", "swiglu_limit") if hasattr(module, name)), None)
    if name is not None and getattr(module, name) != float("inf"):
        both = torch.cat([projection(x).flatten() for projection in (module.gate_proj, module.up_proj)])
        values = both.detach().double().abs().sort()[0][len(both) // 2 :]
        widest = values.diff().argmax()
        setattr(module, name, values[widest : widest + 2].mean().item())


@counted
def test_every_gated_mlp_is_served_or_has_a_reason() -> None:
    assert {cls.__name__ for cls in classes(MLPS) if not is_served(cls)} == UNSUPPORTED[MLPS.name].keys()


@counted
def test_the_families_are_served() -> None:
    assert Counter(find_pattern(cls).module.__name__ for cls in served()) == {
        "LlamaMLP": 140,
        "Phi3MLP": 9,
        "T5DenseGatedActDense": 8,
        "GraniteMoeSharedMLP": 3,
        "T5GemmaMLP": 3,
        "Glm5NextMLP": 2,
        "Lfm2MLP": 2,
        "ModernBertMLP": 2,
        "MoshiGatingMLP": 2,
        "Gemma3nTextMLP": 1,
        "Llama4TextMLP": 1,
        "RecurrentGemmaMlp": 1,
        "BeamMLP": 1,
        "BitNetMLP": 1,
        "DeepseekV4MLP": 1,
        "FalconH1MLP": 1,
        "InklingMLP": 1,
        "LongT5DenseGatedActDense": 1,
        "SeedOssMLP": 1,
        "Step3p7MLP": 1,
        "Zamba2MLP": 1,
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_float32_results_and_gradients_are_the_originals(subtests, activation, bias) -> None:
    """To 2e-6 of the norm: three products in float32, each with sums in another order."""
    for cls in differing(served()):
        if activation != "silu" and find_pattern(cls).layers[0] in SILU_ONLY:
            continue
        with subtests.test(cls.__name__):
            original = instance(cls, activation, bias)
            x = inputs(original)
            device, moved = swapped(original), x.to("npu")
            softnpu.reset_counters()
            found = results(device, moved)
            counters = softnpu.counters()
            assert counters["stream_syncs"] == 0
            if type(getattr(original, "gate_proj", None)).__name__ != "Gemma4ClippableLinear":
                assert "cat" not in counters
            assert counters.keys() & UNITS
            for a, b in zip(found, results(original, x)):
                assert a.dtype == b.dtype
                assert (a.cpu() - b).norm() <= 2e-6 * b.norm()


def test_bfloat16_is_no_further_from_float64_than_the_original(subtests) -> None:
    """In root mean square over the result and all gradients: single ones are too small to compare roundings by."""
    for cls in differing(served()):
        with subtests.test(cls.__name__):
            original = instance(cls).to(torch.bfloat16)
            x = inputs(original, torch.bfloat16)
            limit_apart(original, x)
            truth = results(copy.deepcopy(original).double(), x.double())
            own, found = results(original, x), results(swapped(original), x.to("npu"))
            assert [a.dtype for a in found] == [b.dtype for b in own]
            assert error(found, truth) <= error(own, truth)


@pytest.mark.parametrize("activation", ["relu", "quick_gelu", "tanh"])
def test_other_activations_keep_their_forward(activation) -> None:
    model = nn.ModuleDict({"mlp": instance(named("LlamaMLP"), activation)}).to("npu")
    row, *_ = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert not row.swapped
    assert row.reason.startswith("its activation is ")
    assert row.reason.endswith("the kernels have silu and gelu")


@pytest.mark.parametrize(
    ("name", "activation"),
    [("T5DenseGatedActDense", "gelu_new"), ("ModernBertMLP", "gelu"), ("T5GemmaMLP", "silu"), ("SeedOssMLP", "silu")],
)
def test_dropout_in_training_is_the_originals(name: str, activation: str) -> None:
    """With one state of the generator both drop the same; in inference and with nothing to drop none does.

    To 2e-6 of the norm, as above.
    """
    original = instance(named(name), activation, dropout=0.4).to("npu")
    device, x = swapped(original), inputs(original).npu()
    for training in (True, False):
        found = []
        for module in (device.train(training), original.train(training)):
            torch.npu.manual_seed(7)
            found.append(results(module, x))
        for a, b in zip(*found):
            assert (a - b).norm() <= 2e-6 * b.norm()
        assert bool((found[0][0] == found[0][0].flatten()[0]).all()) is False
    whole = original.train()(x)
    assert not torch.allclose(whole, original.eval()(x))  # it does drop


def test_the_last_projection_of_t5_may_stay_in_float32() -> None:
    original = instance(named("T5DenseGatedActDense"), "gelu_new").to(torch.bfloat16)
    original.wo.float()
    x = inputs(original, torch.bfloat16)
    own, found = results(original, x), results(swapped(original), x.npu())
    assert [a.dtype for a in found] == [b.dtype for b in own]
    truth = results(copy.deepcopy(original).double(), x.double())
    assert error(found, truth) <= error(own, truth)


def test_falcon_h1_is_one_launch_between_its_products_where_nothing_is_trained() -> None:
    original = instance(named("FalconH1MLP"), bias=True)
    device, x = swapped(original), inputs(original)
    softnpu.reset_counters()
    with torch.no_grad():
        found = device(x.npu())
    assert softnpu.counters()["npu_clipped_swiglu"] == 1
    expected = original(x)
    assert (found.cpu() - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("name", ["DeepseekV4MLP", "Glm5NextTextMLP", "FalconH1MLP"])
def test_clamped_and_scaled_gates_are_of_silu_only(name: str) -> None:
    model = nn.ModuleDict({"mlp": instance(named(name), "gelu")}).to("npu")
    row, *_ = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert not row.swapped
    assert row.reason.startswith("its activation is not silu")


def test_a_limit_of_what_the_activation_gives_keeps_the_forward() -> None:
    mlp = instance(named("Step3p7MLP"))
    mlp.limit = 16.0
    row, *_ = kernels_ext_npu.report(kernels_ext_npu.kernelize(nn.ModuleDict({"mlp": mlp}).to("npu")))
    assert row.reason == "it clamps what its activation gives (limit is 16.0), which no operator does"


def test_a_gradient_that_torch_computes_is_in_the_report() -> None:
    """The operator of SwiGLU's gradient takes halves of a multiple of 64 bytes; GeGLU's has no such limit."""
    mlps = nn.ModuleDict({name: LlamaMLP(8, 24, name) for name in ("silu", "gelu")} | {"fits": LlamaMLP(8, 32)})
    model = kernels_ext_npu.kernelize(mlps.to("npu", torch.bfloat16).train())
    reasons = {row.path: row.reason for row in kernels_ext_npu.report(model) if row.kind == MLPS.name}
    assert reasons == {
        "silu": "in torch where it is trained, since halves of 48 bytes are no multiple of 64",
        "gelu": None,
        "fits": None,
    }
    model.eval()
    assert not any(row.reason for row in kernels_ext_npu.report(model) if row.kind == MLPS.name)


@pytest.mark.parametrize("name", ["SeedOssMLP", "T5DenseGatedActDense", "ModernBertMLP", "MoshiGatingMLP", "BitNetMLP"])
def test_an_activation_that_changes_in_a_swapped_mlp_is_the_one_that_computes(name: str) -> None:
    original = instance(named(name), "silu")
    device, x = swapped(original), inputs(original)
    for activation in ("gelu", "relu", "gelu_new"):
        for module in (original, device):
            member = next(n for n in ("act", "act_fn", "activation_fn") if hasattr(module, n))
            setattr(module, member, ACT2FN[activation])
        for a, b in zip(results(device, x.npu()), results(original, x)):
            assert (a.cpu() - b).norm() <= 2e-6 * b.norm()


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"])
def test_an_activation_is_told_by_its_values(activation) -> None:
    model = nn.ModuleDict({"mlp": instance(named("LlamaMLP"), activation)}).to("npu")
    row, *_ = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert row.kernel == ("SwiGLUMLP" if activation in ("silu", "swish") else "GeGLUMLP")
    assert row.swapped


def test_one_class_with_two_activations_in_one_model() -> None:
    llama = named("LlamaMLP")
    names = ["silu", "gelu_pytorch_tanh", "relu", "silu"]
    originals = nn.ModuleList(instance(llama, name) for name in names)
    model = kernels_ext_npu.kernelize(copy.deepcopy(originals).to("npu"))
    assert [row.kernel for row in kernels_ext_npu.report(model)] == ["SwiGLUMLP", "GeGLUMLP", "SwiGLUMLP", "SwiGLUMLP"]
    assert [row.swapped for row in kernels_ext_npu.report(model)] == [True, True, False, True]
    x = inputs(originals[0])
    for a, b in zip(model, originals):
        assert torch.allclose(a(x.npu()).cpu(), b(x), rtol=1e-5, atol=1e-5)
