"""Every gated MLP of transformers on the software device: the values and gradients of its own forward."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

import kernels_ext_npu
from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.selftest.layers.bare_modules import mlp
from tests.support import npu_counts
from tests.support import swapped as swapping
from tests.support.transformers_files import classes, differing
from tests.swiglu.mlp_classes import ARGUMENTS, inputs, instance

pytestmark = pytest.mark.usefixtures("registered")
SILU_ONLY = ("ClampedSwiGLUMLP", "ScaledSwiGLUMLP")
UNITS = {"npu_swiglu", "npu_geglu", "npu_clipped_swiglu"}


@cache
def served() -> list[type[nn.Module]]:
    return [cls for cls in classes(MLPS) if getattr(find_pattern(cls), "repository", None) == "SwiGLU"]


def named(name: str) -> type[nn.Module]:
    return next(cls for cls in served() if cls.__name__ == name)


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    return swapping.results(module, x, **ARGUMENTS.get(type(module).__name__, {}))


def limit_apart(module: nn.Module, x: Tensor) -> None:
    """Set a limit, where there is one, in the widest gap of what it clamps: no rounding decides on a gradient then."""
    name = next((name for name in ("limit", "swiglu_limit") if hasattr(module, name)), None)
    if name is not None and getattr(module, name) != float("inf"):
        both = torch.cat([projection(x).flatten() for projection in (module.gate_proj, module.up_proj)])
        values = both.detach().double().abs().sort()[0][len(both) // 2 :]
        widest = values.diff().argmax()
        setattr(module, name, values[widest : widest + 2].mean().item())


@pytest.mark.parametrize(
    ("activation", "bias"), [("silu", False), ("silu", True), ("gelu_pytorch_tanh", True), ("gelu", False)]
)
def test_float32_results_and_gradients_are_the_originals(subtests, activation, bias) -> None:
    """To 2e-6 of the norm: three products in float32, each with sums in another order."""
    chosen = [c for c in differing(served()) if activation == "silu" or find_pattern(c).layers[0] not in SILU_ONLY]
    originals = [instance(cls, activation, bias) for cls in chosen]
    for original, device in zip(originals, swapping.swapped(*originals)):
        with subtests.test(type(original).__name__):
            x = inputs(original)
            npu_counts.reset()
            found = results(device, x.npu())
            counters = npu_counts.read()
            assert counters["stream_syncs"] == 0
            if type(getattr(original, "gate_proj", None)).__name__ != "Gemma4ClippableLinear":
                assert "cat" not in counters
            assert counters.keys() & UNITS
            swapping.assert_agree(found, results(original, x), 2e-6)


def test_bfloat16_is_no_further_from_float64_than_the_original(subtests) -> None:
    originals = [instance(cls).to(torch.bfloat16) for cls in differing(served())]
    for original in originals:
        limit_apart(original, inputs(original, torch.bfloat16))
    for original, device in zip(originals, swapping.swapped(*originals)):
        with subtests.test(type(original).__name__):
            x = inputs(original, torch.bfloat16)
            truth = results(copy.deepcopy(original).double(), x.double())
            swapping.assert_no_further(results(device, x.npu()), results(original, x), truth)


@pytest.mark.parametrize(
    ("name", "activation"),
    [("T5DenseGatedActDense", "gelu_new"), ("ModernBertMLP", "gelu"), ("T5GemmaMLP", "silu"), ("SeedOssMLP", "silu")],
)
def test_dropout_in_training_is_the_originals(name: str, activation: str) -> None:
    """With one state of the generator both drop the same; in inference and with nothing to drop none does.

    To 2e-6 of the norm, as above.
    """
    original = instance(named(name), activation, dropout=0.4).to("npu")
    (device,), x = swapping.swapped(original), inputs(original).npu()
    for training in (True, False):
        found = []
        for module in (device.train(training), original.train(training)):
            torch.npu.manual_seed(7)
            found.append(results(module, x))
        swapping.assert_agree(found[0], [each.cpu() for each in found[1]], 2e-6)
        assert bool((found[0][0] == found[0][0].flatten()[0]).all()) is False
    whole = original.train()(x)
    assert not torch.allclose(whole, original.eval()(x))  # it does drop


def test_the_last_projection_of_t5_may_stay_in_float32() -> None:
    original = instance(named("T5DenseGatedActDense"), "gelu_new").to(torch.bfloat16)
    original.wo.float()
    x = inputs(original, torch.bfloat16)
    swapping.assert_agree(results(*swapping.swapped(original), x.npu()), results(original, x), 2**-5)


def test_a_gradient_that_torch_computes_is_in_the_report() -> None:
    """The operator of SwiGLU's gradient takes halves of a multiple of 64 bytes; GeGLU's has no such limit."""
    mlps = nn.ModuleDict(
        {name: mlp(LlamaMLP, 8, 24, name) for name in ("silu", "gelu")} | {"fits": mlp(LlamaMLP, 8, 32)}
    )
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
    (device,), x = swapping.swapped(original), inputs(original)
    formulas = [nn.GELU(approximate=formula) for formula in ("none", "tanh", "none")]  # which are of one class
    for activation in (*(ACT2FN[name] for name in ("gelu", "relu", "gelu_new")), *formulas):
        for module in (original, device):
            member = next(n for n in ("act", "act_fn", "activation_fn") if hasattr(module, n))
            setattr(module, member, activation)
        swapping.assert_agree(results(device, x.npu()), results(original, x), 2e-6)


@pytest.mark.parametrize("name", ["DeepseekV4MLP", "FalconH1MLP"])
def test_numbers_that_a_gate_is_clamped_or_scaled_by_are_none_of_the_sizes_that_a_graph_takes(name: str) -> None:
    """To 2e-6 of the norm, as float32 rounds."""
    originals = [instance(named(name), "silu") for _ in range(2)]
    devices, lengths = swapping.swapped(*originals), (5, 9)
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(*devices), backend="aot_eager", fullgraph=True, dynamic=True)
    for length in lengths:
        x = inputs(originals[0])[:, :1].repeat(1, length, 1)
        theirs, ours = x.clone().requires_grad_(), x.npu().requires_grad_()
        expected, found = nn.Sequential(*originals)(theirs), compiled(ours)
        expected.square().sum().backward()
        found.square().sum().backward()
        for a, b in ((found, expected), (ours.grad, theirs.grad)):
            assert (a.detach().cpu() - b.detach()).norm() <= 2e-6 * b.detach().norm()
