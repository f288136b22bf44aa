"""Every rotary embedding of transformers that is served: the values of its own forward to the bit, fewer launches."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

import kernels_ext_npu
import softnpu
from kernels_ext_npu.coverage.survey import module_classes
from kernels_ext_npu.matching.lookup import find_reference
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.references.rotary_embedding import ROTARY_EMBEDDINGS
from tests.support.counted import counted
from tests.support.rotary_functions import LAYER_TYPES, embedding

pytestmark = pytest.mark.usefixtures("registered")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# a row each of its own, with a hole; far positions, where float32 angles are coarse
POSITIONS = torch.stack((torch.arange(7), torch.tensor([0, 0, 0, 5, 6, 4095, 131071])))


@cache
def served() -> tuple[type[nn.Module], ...]:
    return tuple(cls for cls in module_classes() if find_reference(cls) in ROTARY_EMBEDDINGS)


def instance(cls: type[nn.Module], rope_type: str = "default", scaling: float = 1.0) -> nn.Module:
    return embedding(cls, "ByType" in find_reference(cls).layers[0], rope_type, scaling)


def calls(module: nn.Module) -> list[tuple[str, ...]]:
    """The arguments after the positions."""
    return [(name,) for name in LAYER_TYPES] if isinstance(module.rope_type, dict) else [()]


def kernelized(module: nn.Module) -> tuple[nn.Module, kernels_ext_npu.Row]:
    model = nn.ModuleDict({"rotary_emb": copy.deepcopy(module)}).to("npu")
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    return model["rotary_emb"], row


@counted
def test_the_families_are_served() -> None:
    assert Counter(find_reference(cls).module.__name__ for cls in served()) == {
        "LlamaRotaryEmbedding": 123,
        "Gemma3RotaryEmbedding": 15,
        "OlmoRotaryEmbedding": 6,
        "CohereRotaryEmbedding": 4,
        "GptOssRotaryEmbedding": 2,
        "Olmo3RotaryEmbedding": 2,
    }


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, torch.float16])
@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[:1], POSITIONS[1:, 4:5]], ids=["rows", "one row", "decode"])
def test_values_are_those_of_its_own_forward_to_the_bit(subtests, positions: Tensor, dtype) -> None:
    x, positions = torch.zeros(2, 7, 24, dtype=dtype, device="npu"), positions.npu()
    for cls in served():
        with subtests.test(cls.__name__):
            original = instance(cls).to("npu")
            swapped, row = kernelized(original)
            assert row.swapped
            assert row.kind == "rotary tables"
            for arguments in calls(original):
                with Cost() as before:
                    expected = original(x, positions, *arguments)
                with Cost() as after:
                    found = swapped(x, positions, *arguments)
                cast = any(table.dtype != FLOAT32 for table in expected)
                assert after.launches.total() == 4 + cast < before.launches.total()
                assert after.bytes.total() < before.bytes.total()
                for a, b in zip(found, expected, strict=True):
                    assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
                    assert a.is_contiguous()
                    assert torch.equal(a.cpu(), b.cpu())


def test_launches_at_the_size_of_a_model() -> None:
    """4096 positions, a head of 128, bfloat16."""
    from torch._subclasses import FakeTensorMode

    original = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=1)).to("npu")
    swapped, _ = kernelized(original)
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.empty(1, 4096, 128, dtype=BFLOAT16, device="npu")
        for module in (original, swapped):
            module.inv_freq = nn.Buffer(mode.from_tensor(module.inv_freq), persistent=False)
            with Cost() as cost:
                module(x, torch.arange(4096, device="npu")[None])
            launches = cost.launches.total() - cost.launches["arange"]
            found.append((launches, cost.bytes.total() / 1e6))
    print(found)  # launches, and megabytes that include the positions
    assert [launches for launches, _ in found] == [9, 5]
    assert found[1][1] <= 0.75 * found[0][1]


def test_gradients_are_not_recorded() -> None:
    module, _ = kernelized(instance(LlamaRotaryEmbedding))
    module.inv_freq.requires_grad_()
    x = torch.zeros(1, 7, 24, device="npu", requires_grad=True)
    assert not any(table.requires_grad for table in module(x, POSITIONS.npu()))


def test_the_host_does_not_wait() -> None:
    module, _ = kernelized(instance(LlamaRotaryEmbedding))
    x, positions = torch.zeros(1, 7, 24, device="npu"), POSITIONS.npu()
    softnpu.reset_counters()
    module(x, positions)
    assert softnpu.counters()["stream_syncs"] == 0


@pytest.mark.parametrize("reference", ROTARY_EMBEDDINGS, ids=lambda reference: reference.layers[0])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph_with_the_same_values(reference, dynamic) -> None:
    torch._dynamo.reset()
    module, _ = kernelized(instance(reference.module))
    x, positions = torch.zeros(2, 7, 24, dtype=BFLOAT16, device="npu"), POSITIONS.npu()
    compiled = torch.compile(module.forward, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for arguments in calls(module):
        for a, b in zip(compiled(x, positions, *arguments), module(x, positions, *arguments), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_the_layer_alone_computes_what_the_reference_does(kernel: ModuleType, device) -> None:
    for reference in ROTARY_EMBEDDINGS:
        module = instance(reference.module).to(device)
        forward = getattr(kernel.layers, reference.layers[0]).forward
        for arguments in calls(module):
            x = torch.zeros(1, dtype=BFLOAT16, device=device)
            expected = module(x, POSITIONS.to(device), *arguments)
            for a, b in zip(forward(module, x, POSITIONS.to(device), *arguments), expected, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "its frequencies change with the length (dynamic)"),
        ({"rope_type": "longrope", "factor": 2.0, **LONGROPE}, "its frequencies change with the length (longrope)"),
        ({"rope_type": "yarn", "factor": 8.0}, "its rope type is yarn: cos and sin are scaled by 1.208"),
        ({"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.0}, None),
        ({"rope_type": "linear", "factor": 8.0}, None),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            None,
        ),
    ],
)
def test_rope_types(rope, reason) -> None:
    """Of transformers, with its configs: what is refused keeps its forward, and is nobody's fault."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128)
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    original = LlamaRotaryEmbedding(config).to("npu")
    swapped, row = kernelized(original)
    assert (row.swapped, row.reason, row.is_candidate) == (reason is None, reason, reason is None)
    assert row.kind == "rotary tables"
    x = torch.zeros(2, 7, 16, device="npu")
    for a, b in zip(swapped(x, POSITIONS.npu()), original(x, POSITIONS.npu()), strict=True):
        assert torch.equal(a, b)


def test_one_type_of_layer_that_is_scaled_keeps_the_module() -> None:
    module = instance(Gemma3RotaryEmbedding)
    module.rope_type["full_attention"], module.full_attention_attention_scaling = "yarn", 1.5
    _, row = kernelized(module)
    assert row.reason == "its rope type is yarn: cos and sin are scaled by 1.5"


def test_positions_of_three_dimensions_are_not_served() -> None:
    assert find_reference(Qwen2_5_VLRotaryEmbedding) is None


def test_an_instance_whose_rope_types_contradict_its_forward_is_refused() -> None:
    for cls, rope_type in ((LlamaRotaryEmbedding, {"full_attention": "default"}), (Gemma3RotaryEmbedding, "default")):
        module = instance(cls)
        module.rope_type = rope_type
        _, row = kernelized(module)
        assert row.reason.startswith("its rope type is ")
        assert not row.is_candidate


def test_they_are_a_kind_of_their_own() -> None:
    model = nn.ModuleDict({"norm": nn.RMSNorm(4, eps=1e-6), "served": instance(LlamaRotaryEmbedding)}).to("npu")
    model["scaled"] = instance(LlamaRotaryEmbedding, "yarn", 1.2).to("npu")
    report = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert report.summary() == "1 of 1 norms, 1 of 2 rotary tables"
