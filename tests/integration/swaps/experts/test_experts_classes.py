"""Every experts class of transformers on the software device: values and gradients of its own eager forward."""

import copy
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

import kernels_ext_npu
import softnpu
from kernels_ext_npu import catalogue
from kernels_ext_npu.matching.fingerprint import is_experts_class
from tests.support import transformers_files
from tests.support.counted import counted
from tests.support.expert_modules import EXPERTS, inputs, instance

pytestmark = pytest.mark.usefixtures("registered")
FLAGS = ("has_gate", "is_transposed", "has_bias", "is_concatenated", "has_post_expert_norm")
VARIED = (
    "Qwen3MoeExperts",
    "GptOssExperts",
    "OpenAIPrivacyFilterExperts",
    "NemotronHExperts",
    "MuseSparkExperts",
)


@cache
def served() -> tuple[type[nn.Module], ...]:
    return tuple(cls for cls in transformers_files.classes(catalogue.EXPERTS) if is_experts_class(cls))


def named(*names: str) -> list[type[nn.Module]]:
    return [cls for cls in served() if cls.__name__ in names]


def swapped(module: nn.Module) -> nn.Module:
    """A copy on the device, with its kernel."""
    model = nn.ModuleDict({"experts": copy.deepcopy(module)}).to("npu")
    model["experts"].config._experts_implementation = "grouped_mm"
    row, *_ = [row for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(model)) if row.path == "experts"]
    assert (row.kernel, row.swapped) == ("MoEExperts", True), row.reason
    return model["experts"]


def results(module: nn.Module, arguments: tuple[Tensor, ...], call=None) -> list[Tensor]:
    """The result, and the gradients of tokens, routing weights and parameters."""
    x, index, weights = arguments
    x, weights = (value.detach().clone().requires_grad_() for value in (x, weights))
    module.zero_grad()
    y = call(module, x, index, weights) if call else module(x, index, weights)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
    return [y.detach(), x.grad, weights.grad, *(p.grad for p in module.parameters())]


def moved(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.to("npu") for value in arguments)


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    parts = [(a.cpu().double() - c).norm() / c.norm() for a, c in zip(found, truth)]
    return torch.stack(parts).norm().item()


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    """To 2e-6 of the norm: two products in float32, and their gradients, with sums in another order."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype
        assert (a.cpu() - b).norm() <= 2e-6 * b.norm()


@counted
def test_all_of_them_are_served() -> None:
    assert len(served()) == 63
    flags = Counter(tuple(getattr(instance(cls), flag) for flag in FLAGS) for cls in served())
    assert flags == {
        (True, False, False, True, False): 58,
        (True, True, False, True, False): 1,  # Aria
        (True, True, True, False, False): 1,  # gpt-oss
        (True, True, True, True, False): 1,  # OpenAI's privacy filter
        (False, False, False, True, False): 1,  # Nemotron-H
        (True, False, False, True, True): 1,  # Muse Spark
    }


def test_float32_results_and_gradients_are_the_originals(subtests) -> None:
    for cls in transformers_files.differing(served()):
        with subtests.test(cls.__name__):
            original = instance(cls)
            arguments = inputs(original)
            device, on_device = swapped(original), moved(arguments)
            softnpu.reset_counters()
            found = results(device, on_device)
            counters = softnpu.counters()
            assert counters["stream_syncs"] == counters["device_to_host_copies"] == 0
            assert counters["npu_grouped_matmul"] == 6 + 2 * original.has_bias
            assert ("npu_swiglu" in counters or "npu_clipped_swiglu" in counters) == original.has_gate
            agree(found, results(original, arguments))


def test_bfloat16_is_no_further_from_float64_than_the_original(subtests) -> None:
    """In root mean square over the result and all gradients: single ones are too small to compare roundings by."""
    for cls in transformers_files.differing(served()):
        with subtests.test(cls.__name__):
            original = instance(cls).to(torch.bfloat16)
            x, index, weights = inputs(original)
            arguments = (x.bfloat16(), index, weights)
            truth = results(copy.deepcopy(original).double(), (arguments[0].double(), index, weights.double()))
            # the eager forward of one stays in float32, transformers' default does not
            default = grouped_mm_experts_forward if cls in named("OpenAIPrivacyFilterExperts") else None
            own, found = results(original, arguments, default), results(swapped(original), moved(arguments))
            assert [a.dtype for a in found] == [b.dtype for b in own]
            assert error(found, truth) <= error(own, truth)


@pytest.mark.parametrize("routing", ["one expert", "one token", "one choice", "all choices"])
def test_any_routing_gives_what_the_original_gives(subtests, routing) -> None:
    sizes = {"one token": (1, 2), "one choice": (24, 1), "all choices": (5, EXPERTS - 1)}.get(routing, (24, 1))
    for cls in named(*VARIED):
        with subtests.test(cls.__name__):
            original = instance(cls)
            x, index, weights = inputs(original, *sizes)
            arguments = (x, torch.full_like(index, EXPERTS - 1) if routing == "one expert" else index, weights)
            agree_or_none(results(swapped(original), moved(arguments)), results(original, arguments))


def agree_or_none(found: list[Tensor], expected: list[Tensor]) -> None:
    """Experts without tokens have no gradient in the eager forward where no expert has one, and zeros here."""
    for a, b in zip(found, expected):
        if b is None or not b.any():
            assert a is None or not a.any()
        else:
            agree([a], [b])


def test_a_slice_of_experts_gives_what_transformers_gives_for_it(subtests) -> None:
    """As one of two ranks sees it: the others' experts are sentinels, with weight zero. Both ranks add up to all."""
    for cls in named(*VARIED):
        with subtests.test(cls.__name__):
            original = instance(cls)
            x, index, weights = inputs(original, k=3)
            whole = results(original, (x, index, weights))
            total, half = torch.zeros_like(whole[0]), EXPERTS // 2
            for rank in range(2):
                part = copy.deepcopy(original)
                for name, parameter in part.named_parameters(recurse=False):
                    setattr(part, name, nn.Parameter(parameter.detach()[rank * half : (rank + 1) * half].clone()))
                part.num_experts, part._is_expert_parallel = half, True
                absent = (index < rank * half) | (index >= (rank + 1) * half)
                local = (index - rank * half).masked_fill(absent, half)
                arguments = (x, local, weights.masked_fill(absent, 0))
                softnpu.reset_counters()
                found = results(swapped(part), moved(arguments))
                assert softnpu.counters()["stream_syncs"] == 0
                total += found[0].cpu()
                agree(found, results(part, arguments, grouped_mm_experts_forward))
                agree(found[:1], results(part, arguments, batched_mm_experts_forward)[:1])
            assert (total - whole[0]).norm() <= 4e-6 * whole[0].norm()


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu", "relu", "silu"])
def test_the_activation_of_an_instance_decides(activation) -> None:
    original = instance(named("MixtralExperts")[0], activation)
    arguments = inputs(original)
    device = swapped(original)
    softnpu.reset_counters()
    found = results(device, moved(arguments))
    operators = {"silu": "npu_swiglu", "gelu_pytorch_tanh": "npu_geglu"}
    for name, operator in operators.items():
        assert (operator in softnpu.counters()) == (activation == name)
    agree(found, results(original, arguments))
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
            agree(results(swapped(original), moved(arguments)), results(original, arguments))


def test_frozen_experts_have_no_gradient_and_tokens_have_theirs() -> None:
    original = instance(named("Qwen3MoeExperts")[0]).requires_grad_(False)
    arguments = inputs(original)
    softnpu.reset_counters()
    found = results(swapped(original), moved(arguments))
    assert softnpu.counters()["npu_grouped_matmul"] == 4
    expected = results(original, arguments)
    agree(found[:3], expected[:3])
    assert found[3:] == expected[3:] == [None, None]


@pytest.mark.parametrize("name", VARIED)
def test_a_module_compiles_in_one_graph(name) -> None:
    torch._dynamo.reset()
    device = swapped(instance(*named(name)))
    arguments = moved(inputs(device))
    kernels_ext_npu.report(nn.ModuleDict({"experts": device}))
    eager = results(device, arguments)
    compiled = torch.compile(device, fullgraph=True, backend="aot_eager")
    x, index, weights = arguments
    leaves = [value.detach().clone().requires_grad_() for value in (x, weights)]
    device.zero_grad()
    y = compiled(leaves[0], index, leaves[1])
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
    found = [y.detach(), leaves[0].grad, leaves[1].grad, *(p.grad for p in device.parameters())]
    for a, b in zip(found, eager):
        assert torch.equal(a, b)
