"""Every layer norm of transformers that is written out, and every norm of a sum: values and gradients."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm

import kernels_ext_npu
from kernels_ext_npu.catalogue import LAYER_NORMS
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.selftest.layers import bare_modules
from tests.support import npu_counts, zoo
from tests.support.agreement import assert_agrees
from tests.support.served import kernelized
from tests.support.swapped import assert_agree, assert_no_further, in_float64, moved, results, swapped
from tests.support.transformers_files import classes, differing

pytestmark = pytest.mark.usefixtures("registered")
SIZE = 32


def instance(cls: type[nn.Module]) -> nn.Module:
    """One of the class, with what its forward reads, and random weights."""
    torch.manual_seed(0)
    is_closed = find_pattern(cls).layers == ("AddLayerNorm",)
    module = (bare_modules.closed_residual(SIZE) if is_closed else bare_modules.norm(cls, SIZE)).eval()
    module.__class__ = cls
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=0.3, std=0.4)
    return module


def inputs(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = 1 + hasattr(module, "dense")
    return [torch.randn(2, 6, SIZE, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_the_originals(subtests, dtype) -> None:
    """To 2e-6 of the norm: sums in another order. In bfloat16 they are no further from float64.

    There 1e-2: the gradient of torch's operator is the same on both sides.
    """
    originals = [instance(cls).to(dtype) for cls in differing(classes(LAYER_NORMS))]
    for original, device in zip(originals, swapped(*originals)):
        with subtests.test(type(original).__name__):
            arguments = inputs(original, dtype)
            npu_counts.reset()
            found = results(device, *moved(arguments))
            counters = npu_counts.read()
            assert counters["stream_syncs"] == 0
            assert counters.get("npu_add_layer_norm", 0) == hasattr(original, "dense")
            assert counters["native_layer_norm_backward"] == 1
            own = results(original, *arguments)
            if dtype is torch.float32:
                assert_agree(found, own, 2e-6)
            else:
                assert_no_further(found, own, in_float64(original, *arguments), slack=1e-2)


@pytest.mark.parametrize(("dtype", "weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_weight_widens_the_result_as_it_does_in_deberta(dtype, weight) -> None:
    """To a rounding of the normed values to the input's dtype, which the original multiplies by the weight."""
    original = instance(DebertaLayerNorm).to(weight)
    x = torch.randn(2, 6, SIZE).to(dtype)
    found, expected = swapped(original)[0](x.npu()), original(x)
    assert found.dtype == expected.dtype == torch.float32
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    assert (found.cpu() - expected).norm() <= tolerance * expected.norm()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "hook": lambda module: module.LayerNorm.register_forward_hook(lambda module, args, output: 2 * output),
    "eps": lambda module: setattr(module.LayerNorm, "eps", 0.5),
    "another norm": lambda module: setattr(module, "LayerNorm", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_that_changes_is_the_one_that_counts(change: str) -> None:
    original = bare_modules.closed_residual(SIZE).eval()
    (device,) = swapped(original)
    for module in (original, device):
        CHANGES[change](module)
    arguments = inputs(original)
    assert_agree(results(device, *moved(arguments)), results(original, *arguments), 2e-6)


def test_a_dropout_drops_the_same() -> None:
    original = bare_modules.closed_residual(SIZE, p=0.5).npu().train()
    device, found = swapped(original)[0].train(), []
    for module in (device, original):
        torch.npu.manual_seed(3)
        found.append(results(module, *moved(inputs(original))))
    for a, b in zip(*found):
        assert (a - b).norm() <= 2e-6 * b.norm()


def test_a_sum_and_its_norm_are_one_launch_in_bert() -> None:
    """Two in place of one for each layer's two residuals, and the gradients need none more."""
    kernels_ext_npu.register(kernels=["RMSNorm"])
    calls = []
    for model in (zoo.build("bert").to("npu"), kernelized("bert")):
        npu_counts.reset()
        assert_agrees("bert", model)
        calls.append(Counter(npu_counts.read()))
    before, after = calls
    sums = 2 * model.config.num_hidden_layers
    assert after["npu_add_layer_norm"] == before["add"] - after["add"] == sums
    assert before["native_layer_norm"] - after["native_layer_norm"] == before.total() - after.total() == sums
    assert before["stream_syncs"] == after["stream_syncs"]
