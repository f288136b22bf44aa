"""Every rotary embedding of transformers that is served: the values of its own forward to the bit, fewer launches."""

import copy
import inspect
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

import kernels_ext_npu
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.patterns import rope_tables
from kernels_ext_npu.selftest.layers.bare_modules import original
from kernels_ext_npu.selftest.layers.rotary_arguments import LAYER_TYPES, embedding
from tests.support import npu_counts

pytestmark = pytest.mark.usefixtures("registered")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# a row each of its own, with a hole; far positions, where float32 angles are coarse
POSITIONS = torch.stack((torch.arange(7), torch.tensor([0, 0, 0, 5, 6, 4095, 131071])))
PATCHES = torch.stack((torch.arange(35) // 7, torch.arange(35) % 7), -1)
TABLES = rope_tables.PATTERNS
# of transformers, one for each way to choose what belongs to a frequency
COMPOSED = """
    cohere_compass.CohereCompassRotaryEmbedding ernie4_5_vl_moe.Ernie4_5_VLMoeTextRotaryEmbedding
    gemma4.Gemma4VisionRotaryEmbedding glm4v.Glm4vTextRotaryEmbedding glm4v_moe.Glm4vMoeTextRotaryEmbedding
    hunyuan_vl.HunYuanVLRotaryEmbedding kimi_k25.Kimi_K25VisionRotaryEmbedding
    minimax_m3_vl.MiniMaxM3VLVisionRotaryEmbedding neomme.NeoMMERotaryEmbedding pixtral.PixtralVisionRotaryEmbedding
    qwen2_5_vl.Qwen2_5_VLRotaryEmbedding qwen3_vl.Qwen3VLTextRotaryEmbedding qwen3_vl.Qwen3VLVisionRotaryEmbedding
    sam2_video.Sam2VideoVisionRotaryEmbedding step3p7.Step3p7VisionRotaryEmbedding
"""


def composes(cls: type[nn.Module]) -> bool:
    """Whether a table has positions of several dimensions, of which it chooses one for each frequency."""
    return hasattr(cls, "recomposition_frequencies")


def make_positions(cls: type[nn.Module], positions: Tensor) -> Tensor:
    """Positions of the dimensions that a table has: a row of them for each, or two numbers for each patch."""
    reference = find_pattern(cls)
    if "OfPatches" in reference.layers[0]:
        return PATCHES.expand(2, -1, -1) if cls.__name__ == "Gemma4VisionRotaryEmbedding" else PATCHES
    if not composes(cls):
        return positions
    dimensions = {"RotaryEmbeddingComposedBySections": 4, "RotaryEmbeddingOfRowsByType": 2}
    return torch.stack([positions // (1 + i) for i in range(dimensions.get(reference.layers[0], 3))])


def instance(cls: type[nn.Module], rope_type: str = "default", scaling: float = 1.0) -> nn.Module:
    return embedding(cls, "ByType" in find_pattern(cls).layers[0], rope_type, scaling)


def composed() -> list[type[nn.Module]]:
    named = [name.split(".") for name in COMPOSED.split()]
    return [getattr(import_module(f"transformers.models.{file}.modeling_{file}"), name) for file, name in named]


def calls(module: nn.Module) -> list[tuple[str, ...]]:
    """The arguments after the positions."""
    return [(name,) for name in LAYER_TYPES] if isinstance(getattr(module, "rope_type", None), dict) else [()]


def kernelized(module: nn.Module) -> tuple[nn.Module, kernels_ext_npu.Row]:
    model = nn.ModuleDict({"rotary_emb": copy.deepcopy(module)}).to("npu")
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    return model["rotary_emb"], row


@pytest.mark.parametrize(("dtype", "scaling"), [(FLOAT32, 1.0), (BFLOAT16, 1.25), (torch.float16, 1.0)])
@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[:1], POSITIONS[1:, 4:5]], ids=["rows", "one row", "decode"])
def test_values_are_those_of_its_own_forward_to_the_bit(subtests, positions: Tensor, dtype, scaling: float) -> None:
    """Of the references; which classes these stand for is what matching is about, but for what a class chooses."""
    x, rows = torch.zeros(2, 7, 24, dtype=dtype, device="npu"), positions
    for cls in (*(original(table.name) for table in TABLES), *composed()):
        with subtests.test(cls.__name__):
            table, positions = instance(cls, scaling=scaling).to("npu"), make_positions(cls, rows).npu()
            swapped, row = kernelized(table)
            assert row.swapped
            assert row.kind == "rotary tables"
            for arguments in calls(table):
                with Cost() as before:
                    expected = table(x, positions, *arguments)
                with Cost() as after:
                    found = swapped(x, positions, *arguments)
                cast = any(table.dtype != FLOAT32 for table in expected)
                if not composes(cls):
                    learned = 2 * hasattr(table, "alpha")
                    assert after.launches.total() == 4 + cast + (scaling != 1) + learned
                assert after.launches.total() < before.launches.total()
                if not composes(cls) and scaling == 1:  # a scale is for whole cos and sin
                    assert after.bytes.total() < before.bytes.total()
                assert "stream_syncs" not in after.launches
                for a, b in zip(found, expected, strict=True):
                    assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
                    assert a.is_contiguous()
                    assert torch.equal(a.cpu(), b.cpu())


def test_gradients_are_not_recorded() -> None:
    module, _ = kernelized(instance(LlamaRotaryEmbedding))
    module.inv_freq.requires_grad_()
    x = torch.zeros(1, 7, 24, device="npu", requires_grad=True)
    assert not any(table.requires_grad for table in module(x, POSITIONS.npu()))


def test_what_has_a_gradient_can_be_written_into_one_table() -> None:
    module, _ = kernelized(instance(LlamaRotaryEmbedding))
    cos, sin = module(torch.zeros(1, 7, 24, device="npu"), POSITIONS[:1].npu())
    factor, before = torch.full((24,), 2.0, device="npu", requires_grad=True), (cos.clone(), sin.clone())
    cos.mul_(factor).sum().backward()
    assert torch.equal(factor.grad, before[0].sum((0, 1)))
    assert torch.equal(cos, 2 * before[0])
    assert torch.equal(sin, before[1])
    assert not sin.requires_grad


@pytest.mark.parametrize("positions", [POSITIONS[:1], POSITIONS[1:, 4:5]], ids=["one row", "decode"])
def test_the_gradient_of_trained_frequencies_is_that_of_the_formula(positions: Tensor) -> None:
    """In float64, as Mistral Large 4's table has it; angles of up to 131,071 radians are rounded in float32 first."""
    (table,) = (original(each.name) for each in TABLES if each.layers == ("RotaryEmbeddingTrained",))
    module = instance(table, scaling=1.25)
    module.alpha = nn.Parameter(module.alpha)
    swapped, row = kernelized(module)
    assert row.swapped
    cos, sin = swapped(torch.zeros(1, 1, 24, device="npu"), positions.npu())
    factors = torch.linspace(-1, 2, cos.numel()).view(cos.shape)
    (gradient,) = torch.autograd.grad((cos * factors.npu()).sum() + (sin * factors.flip(-1).npu()).sum(), swapped.alpha)

    alpha = module.alpha.detach().double().requires_grad_()
    rounded = positions[..., None].float() * (module.inv_freq * module.alpha.exp())
    angles = positions[..., None] * module.inv_freq.double() * alpha.exp()
    angles = torch.cat((angles + (rounded.double() - angles).detach(),) * 2, -1)  # its value is the rounded one
    total = 1.25 * ((angles.cos() * factors).sum() + (angles.sin() * factors.flip(-1)).sum())
    (expected,) = torch.autograd.grad(total, alpha)
    # three products and two sums of float32, of terms that are as large as the positions and cancel
    bound = 5 * torch.finfo(FLOAT32).eps * 4 * 1.25 * (angles.abs().unflatten(-1, (2, 12)).sum((0, 1, 2)))
    assert (gradient.cpu() - expected).abs().le(bound).all()


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
ROPES = [  # the others change frequencies and scale when they are made, and never again
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 2.0, **LONGROPE},
    {"rope_type": "yarn", "factor": 8.0},
]


def scaled(rope: dict) -> LlamaRotaryEmbedding:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128)
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    return LlamaRotaryEmbedding(config).to("npu")


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rope_types(rope) -> None:
    """Of transformers, with its configs. Lengths grow beyond what was trained and back, as in a conversation."""
    original = scaled(rope)
    swapped, row = kernelized(original)
    assert (row.swapped, row.reason, row.kernel) == (True, None, "RotaryEmbedding")
    x = torch.zeros(2, 7, 16, device="npu")
    before = {name: tensor.clone() for name, tensor in original.named_buffers()}
    for positions in (POSITIONS % 50, POSITIONS, POSITIONS + 3000, POSITIONS % 50):
        npu_counts.reset()
        expected = original(x, positions.npu())
        waited = npu_counts.read()["stream_syncs"]
        npu_counts.reset()
        found = swapped(x, positions.npu())
        assert npu_counts.read()["stream_syncs"] == waited  # those of transformers' own choice of frequencies
        assert all(map(torch.equal, found, expected))
    assert swapped.attention_scaling == original.attention_scaling
    for name, tensor in swapped.named_buffers():
        assert torch.equal(tensor, dict(original.named_buffers())[name]), name
        assert tensor.shape == before[name].shape


@pytest.mark.skipif(
    "torch.where" not in inspect.getsource(dynamic_rope_update), reason="transformers asks the host for the length here"
)
def test_frequencies_that_follow_the_length_are_captured_in_one_graph() -> None:
    torch._dynamo.reset()
    swapped, _ = kernelized(scaled(ROPES[1]))
    x = torch.zeros(2, 7, 16, device="npu")
    compiled = torch.compile(swapped.forward, fullgraph=True, backend="aot_eager")
    for positions in (POSITIONS % 50, POSITIONS):
        assert all(map(torch.equal, compiled(x, positions.npu()), swapped(x, positions.npu())))


def test_a_scale_that_changes_is_the_one_that_counts() -> None:
    original = instance(Gemma3RotaryEmbedding).to("npu")
    module, row = kernelized(original)
    assert row.swapped
    x = torch.zeros(1, 7, 24, device="npu")
    for table in (original, module):
        table.rope_type["full_attention"], table.full_attention_attention_scaling = "yarn", 1.5
    for arguments in calls(module):
        tables = (each(x, POSITIONS.npu(), *arguments) for each in (module, original))
        assert all(map(torch.equal, *tables))


def test_an_instance_whose_rope_types_contradict_its_forward_is_refused() -> None:
    for cls, rope_type in ((LlamaRotaryEmbedding, {"full_attention": "default"}), (Gemma3RotaryEmbedding, "default")):
        module = instance(cls)
        module.rope_type = rope_type
        _, row = kernelized(module)
        assert row.reason.startswith("its rope type is ")
        assert not row.is_candidate


# what else a method may do with cos and sin, which it cannot with angles
COMPUTED = {
    "scales": lambda self, freq: 2 * freq[0].repeat(1, 1, 2),
    "adds": lambda self, freq: (freq[0] + freq[1]).repeat(1, 1, 2),
    "averages": lambda self, freq: freq.mean(0).repeat(1, 1, 2),
    "turns": lambda self, freq: torch.cat([-freq[0], freq[1]], dim=-1),
    "compares": lambda self, freq: freq.amax(0).repeat(1, 1, 2),
    "leaves out": lambda self, freq: torch.cat([freq[0], torch.zeros_like(freq[1])], dim=-1),
    "asks for more": lambda self, freq: freq[:3, :, :, 17],
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_does_more_than_choose_is_not_nor_what_cannot_be_asked(name: str) -> None:
    cls = type("Computed", (Qwen2_5_VLRotaryEmbedding,), {"recomposition_frequencies": COMPUTED[name]})
    _, row = kernelized(instance(cls))
    why = "cannot be asked what it chooses" if name == "asks for more" else "does more than choose"
    assert (row.swapped, row.reason) == (False, f"its recomposition_frequencies {why}")
