"""Every experts class of transformers on the software device: values and gradients of its own eager forward."""

import copy
from collections import Counter
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

import kernels_ext_npu
from kernels_ext_npu import catalogue
from kernels_ext_npu.matching.fingerprint import is_experts_class
from kernels_ext_npu.selftest.comparing import doubled
from tests.fused_moe.expert_modules import EXPERTS, inputs, instance
from tests.support import npu_counts, transformers_files
from tests.support import swapped as swapping
from tests.support.counted import counted
from tests.support.swapped import assert_agree, moved, results

pytestmark = pytest.mark.usefixtures("registered")
FLAGS = ("has_gate", "is_transposed", "has_bias", "is_concatenated", "has_post_expert_norm")
OWN_GATES = ("Inkling2Experts", "Inkling2LoopExperts")  # of transformers 5.23: caps that no operator has
VARIED = ("Qwen3MoeExperts", "GptOssExperts", "OpenAIPrivacyFilterExperts", "NemotronHExperts", "MuseSparkExperts")


@cache
def served() -> tuple[type[nn.Module], ...]:
    return tuple(cls for cls in transformers_files.classes(catalogue.EXPERTS) if is_experts_class(cls))


def named(*names: str) -> list[type[nn.Module]]:
    return [cls for cls in served() if cls.__name__ in names]


def swapped(*originals: nn.Module) -> list[nn.Module]:
    """Copies on the device, with their kernel: the config is not left to say how experts are computed."""
    for original in originals:
        original.config._experts_implementation = "grouped_mm"
    found = swapping.swapped(*originals)
    for original in originals:
        original.config._experts_implementation = "eager"
    return found


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    """To 2e-6 of the norm: two products in float32, and their gradients, with sums in another order."""
    assert_agree(found, expected, 2e-6)


@counted
def test_all_of_them_are_served() -> None:
    assert len(served()) == 68
    flags = Counter(tuple(getattr(instance(cls), flag) for flag in FLAGS) for cls in served())
    assert flags == {
        (True, False, False, True, False): 63,
        (True, True, False, True, False): 1,  # Aria
        (True, True, True, False, False): 1,  # gpt-oss
        (True, True, True, True, False): 1,  # OpenAI's privacy filter
        (False, False, False, True, False): 1,  # Nemotron-H
        (True, False, False, True, True): 1,  # Muse Spark
    }


def test_float32_results_and_gradients_are_the_originals(subtests) -> None:
    originals = [instance(cls) for cls in transformers_files.differing(served())]
    for original, device in zip(originals, swapped(*originals)):
        with subtests.test(type(original).__name__):
            arguments = inputs(original)
            npu_counts.reset()
            found = results(device, *moved(arguments))
            counters = npu_counts.read()
            assert counters["stream_syncs"] == counters["device_to_host_copies"] == 0
            assert counters["npu_grouped_matmul"] == 6 + 2 * original.has_bias
            is_fused = original.has_gate and type(original).__name__ not in OWN_GATES
            assert ("npu_swiglu" in counters or "npu_clipped_swiglu" in counters) == is_fused
            agree(found, results(original, *arguments))


def test_bfloat16_is_no_further_from_float64_than_the_original(subtests) -> None:
    originals = [instance(cls).to(torch.bfloat16) for cls in transformers_files.differing(served())]
    for original, device in zip(originals, swapped(*originals)):
        with subtests.test(type(original).__name__):
            x, *chosen = inputs(original)
            arguments = (x.bfloat16(), *chosen)
            truth = results(copy.deepcopy(original).double(), x.bfloat16().double(), *doubled(chosen))
            # the eager forward of one stays in float32, transformers' default does not
            is_wide = type(original) in named("OpenAIPrivacyFilterExperts")
            default = partial(grouped_mm_experts_forward, original) if is_wide else None
            own = results(original, *arguments, call=default)
            swapping.assert_no_further(results(device, *moved(arguments)), own, truth)


def test_a_slice_of_experts_gives_what_transformers_gives_for_it(subtests) -> None:
    """As one of two ranks sees it: the others' experts are sentinels, with weight zero. Both ranks add up to all."""
    for cls in named(*VARIED):
        with subtests.test(cls.__name__):
            original = instance(cls)
            x, index, weights = inputs(original, k=3)
            whole = results(original, x, index, weights)
            total, half = torch.zeros_like(whole[0]), EXPERTS // 2
            for rank in range(2):
                part = copy.deepcopy(original)
                for name, parameter in part.named_parameters(recurse=False):
                    setattr(part, name, nn.Parameter(parameter.detach()[rank * half : (rank + 1) * half].clone()))
                part.num_experts, part._is_expert_parallel = half, True
                absent = (index < rank * half) | (index >= (rank + 1) * half)
                local = (index - rank * half).masked_fill(absent, half)
                arguments = (x, local, weights.masked_fill(absent, 0))
                npu_counts.reset()
                found = results(*swapped(part), *moved(arguments))
                assert npu_counts.read()["stream_syncs"] == 0
                total += found[0].cpu()
                agree(found, results(part, *arguments, call=partial(grouped_mm_experts_forward, part)))
                agree(found[:1], results(part, *arguments, call=partial(batched_mm_experts_forward, part))[:1])
            assert (total - whole[0]).norm() <= 4e-6 * whole[0].norm()


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu", "relu", "silu"])
def test_the_activation_of_an_instance_decides(activation) -> None:
    original = instance(named("MixtralExperts")[0], activation)
    arguments = inputs(original)
    (device,) = swapped(original)
    npu_counts.reset()
    found = results(device, *moved(arguments))
    operators = {"silu": "npu_swiglu", "gelu_pytorch_tanh": "npu_geglu"}
    for name, operator in operators.items():
        assert (operator in npu_counts.read()) == (activation == name)
    agree(found, results(original, *arguments))
    (row,) = kernels_ext_npu.report(nn.ModuleDict({"experts": device}))
    assert (row.reason is None) == (activation in operators)


def test_a_limit_of_another_size_is_a_limit(subtests) -> None:
    """Beyond any value that tokens take it changes nothing, and must not be mistaken for nothing."""
    (cls,) = named("DeepseekV4Experts")
    for limit in (0.5, 1e3, 1e5):
        with subtests.test(limit=limit):
            original = instance(cls)
            original.limit = limit
            x, index, weights = inputs(original)
            arguments = (x * 2 * limit, index, weights)
            agree(results(*swapped(original), *moved(arguments)), results(original, *arguments))


@pytest.mark.parametrize("name", VARIED)
def test_a_module_compiles_in_one_graph(name) -> None:
    torch._dynamo.reset()
    (device,) = swapped(instance(*named(name)))
    arguments = moved(inputs(device))
    kernels_ext_npu.report(nn.ModuleDict({"experts": device}))
    eager = results(device, *arguments)
    compiled = torch.compile(device, fullgraph=True, backend="aot_eager")
    found = results(device, *arguments, call=compiled)
    for a, b in zip(found, eager):
        assert torch.equal(a, b)
