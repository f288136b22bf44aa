"""Models with linear attention, with its kernels: what they give, what is reported of them, and what they cost."""

import importlib
import itertools
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.swaps import functions
from kernels_ext_npu.swaps.decision import Row, View
from tests.support import npu_counts, served, zoo
from tests.support.nearness import TOLERANCE, assert_gradients_near, assert_near, gradients
from tests.support.served import kernelized

pytestmark = pytest.mark.usefixtures("registered")

NAMES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid"]
SCANS = ["mamba", "falcon_mamba", "jamba", "zamba"]
INDEXED = {"layer_types": ["linear_attention", "indexed_attention"]}
BUDGET = {
    f"indexer_{name}": value
    for name, value in {"n_heads": 2, "kv_heads": 1, "head_dim": 16, "budget": 8, "compress_ratio": 2}.items()
}
CHOSEN = {"qk_rope_head_dim": 0, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4, "index_kpool": 2}
BLOCKS = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
MHA = {"num_key_value_heads": 4}
# with attention of a kind that no other model of the zoo has, or scans of several heads
OTHERS = {
    "zamba": ("ZambaForCausalLM", BLOCKS | {"n_mamba_heads": 2}, zoo.text),
    "bailing_hybrid": ("BailingHybridForCausalLM", MHA | LINEAR, zoo.text),
    "qwen4_exp": ("Qwen4ExpForCausalLM", INDEXED | BUDGET, zoo.text),
    "glm5_next": ("Glm5NextForConditionalGeneration", {"text_config": MHA | INDEXED | CHOSEN}, zoo.GRID),
}


@pytest.fixture(autouse=True)
def others(monkeypatch) -> None:
    for name, described in OTHERS.items():
        monkeypatch.setitem(zoo.ARCHITECTURES, name, zoo.Architecture("hybrid", *described))


def rows(model: nn.Module) -> dict[str, Row]:
    return {row.class_name: row for row in served.rows(model, "linear attention calls")}


def outcome(name: str, model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits, gradients, tokens of prefill and decode, on the CPU."""
    inputs = zoo.inputs(name, model)
    logits = model(**inputs).logits
    logits.square().mean().backward()
    tokens = model.eval().generate(**inputs, max_new_tokens=5, do_sample=False)
    return [logits.detach().cpu(), torch.cat([g.cpu().flatten() for g in gradients(model).values()]), tokens.cpu()]


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_gives_what_transformers_own_functions_give(name: str) -> None:
    """Of which the kernels are the forwards until they are put back, on the CPU too. A row has padding on the left.

    The models of the zoo itself are in test_kernelized_models.py.

    Both are rounded: where they differ by more than one may, ours is compared with the model in float64.
    """
    model = kernelized(name)
    found = outcome(name, model)
    assert any(row.swapped for row in rows(model).values())
    functions.revert(View(model))
    original = zoo.build(name)
    expected = outcome(name, original)
    assert not any(row.swapped for row in rows(original).values())
    if any((ours - theirs).norm() > TOLERANCE * theirs.norm() for ours, theirs in zip(found[:2], expected[:2])):
        for ours, exact in zip(found, outcome(name, zoo.build(name).double())[:2]):
            assert_near(ours, exact)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("name", NAMES)
def test_every_function_is_swapped_and_called(name: str) -> None:
    model = kernelized(name)
    found = rows(model)
    assert {row.kernel for row in found.values()} in (
        {"ChunkGatedDeltaRule", "FusedRecurrentGatedDeltaRule", "CausalConv1d", "CausalConv1dUpdate"},
        {"ChunkKDA", "FusedRecurrentKDA", "CausalConv1d", "CausalConv1dUpdate"},
    )
    assert all(row.swapped and row.reason is None for row in found.values())
    npu_counts.reset()
    with torch.no_grad():
        zoo.logits(name, model)
    assert not {"linalg_solve_triangular", "triangular_solve"} & npu_counts.read().keys()


def test_scans_keep_their_functions_and_say_why() -> None:
    found = rows(kernelized("mamba2"))
    assert {name for name, row in found.items() if row.swapped} == {"causal_conv1d_fn", "causal_conv1d_update"}
    for row in found.values():
        if not row.swapped:
            assert "products of chunks" in row.reason or "one step of a scan" in row.reason or "mamba-ssm" in row.reason
            assert not row.is_candidate


@pytest.mark.parametrize("name", SCANS)
def test_selective_scans_are_swapped_and_take_no_token_by_itself(name: str) -> None:
    """A chunk of 32 tokens more is one launch more, of each layer and head."""
    model = kernelized(name).eval()
    assert rows(model)["mamba_selective_scan"].kernel == "SelectiveScan"
    launches = []
    for tokens in (32, 64, 128):
        npu_counts.reset()
        with torch.no_grad():
            model(torch.ones(1, tokens, dtype=torch.long, device="npu"), use_cache=False)
        launches.append(npu_counts.read()["addcmul"])
    scans = launches[1] - launches[0]
    assert launches[2] - launches[1] == 2 * scans
    assert 0 < scans <= 8


@pytest.mark.parametrize(
    ("name", "bounds"),
    [*((name, "seq_idx") for name in (*SCANS, "mamba2")), ("mamba", "cu_seq_lens_q"), ("mamba2", "cu_seq_lens_q")],
)
def test_packed_sequences_are_refused_before_scans_that_would_mix_them(name: str, bounds: str) -> None:
    """transformers refuses the first of the two, in the convolution, which our kernel could keep apart by itself."""
    model = kernelized(name).eval()
    mixer = next(m for m in model.modules() if hasattr(m, "conv1d"))
    hidden = torch.randn(1, 12, model.config.hidden_size).npu()
    given = {"seq_idx": torch.tensor([[0] * 5 + [1] * 7]), "cu_seq_lens_q": torch.tensor([0, 5, 12])}[bounds].npu()
    with pytest.raises(ValueError, match="carries the state of a packed sequence into the next one"):
        mixer(hidden, **{bounds: given})


def test_a_function_of_an_installed_package_stays_unless_told_otherwise(monkeypatch) -> None:
    """As transformers takes it where flash-linear-attention is installed: its wrapper holds the package's function."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    def package_rule(query, key, value, g, beta, **kwargs):
        raise AssertionError

    package_rule.__module__ = "fla.ops.gated_delta_rule"
    module = modeling_qwen3_next.torch_chunk_gated_delta_rule
    wrapped = find_cell(vars(type(module))["forward"], "func")
    for name, value in {"implementation": package_rule, "is_new_implementation": True}.items():
        cell = find_cell(wrapped, name, itself=True)
        monkeypatch.setattr(cell, "cell_contents", value)
    found = rows(kernelized("qwen3_next"))["torch_chunk_gated_delta_rule"]
    assert not found.swapped
    assert not found.is_candidate
    assert found.reason == "computed by fla.ops.gated_delta_rule: register(over_packages=True) takes the kernel"
    kernels_ext_npu.register(over_packages=True)
    assert rows(kernelized("qwen3_next"))["torch_chunk_gated_delta_rule"].swapped


def find_cell(function: FunctionType, name: str, itself: bool = False):
    cell = function.__closure__[function.__code__.co_freevars.index(name)]
    return cell if itself else cell.cell_contents


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_packed_sequences_give_what_they_give_alone(name: str) -> None:
    """With the bounds that transformers' collator gives: transformers' own functions refuse them, or mix sequences."""
    model = kernelized(name).eval()
    ends = [0, 5, 12]
    bounds = torch.tensor(ends, dtype=torch.int32).npu()
    mixer = next(m for m in model.modules() if hasattr(m, "conv1d"))
    hidden = torch.randn(1, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).npu()
    with torch.no_grad():
        packed = mixer(hidden, cu_seq_lens_q=bounds, seq_idx=torch.tensor([[0] * 5 + [1] * 7]).npu())
        alone = torch.cat([mixer(hidden[:, a:b]) for a, b in itertools.pairwise(ends)], 1)
    assert_near(packed, alone)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_it_trains_as_without(name: str, reentrant: bool) -> None:
    found = []
    for again in (False, True):
        model = kernelized(name).train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        zoo.logits(name, model, use_cache=False).square().mean().backward()
        found.append(gradients(model))
    assert_gradients_near(*found)


@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba"])  # with a scan behind it
@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", None])
def test_a_convolution_has_any_activation_of_transformers(name: str, activation: str | None) -> None:
    """Of whole sequences, and of new tokens behind a state."""
    original, model = zoo.build(name), kernelized(name)
    for module in (*original.modules(), *model.modules()):
        if hasattr(module, "conv1d"):
            module.activation = activation
    for found, expected in zip(outcome(name, model), outcome(name, original), strict=True):
        assert_near(found, expected)


def test_a_convolution_of_packed_rows_has_any_activation() -> None:
    """That of each sequence by itself."""
    kernelized("qwen3_5_text")
    convolve = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5").causal_conv1d_fn
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 6, 9), (6, 4), (6,)))
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device="npu")
    found = convolve(x.npu(), weight.npu(), bias.npu(), "relu", cu_seqlens=bounds)
    assert_near(found, torch.cat([convolve(part, weight, bias, "relu") for part in x.split([4, 5], -1)], -1))


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_recurrences_are_told_that_sequences_are_split(name: str) -> None:
    """Between devices of which there is one here; tests/distributed has several."""
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, tokens = kernelized(name), torch.arange(8, device="npu")[None]
        mesh = init_device_mesh("npu", (1,))
        with (
            context_parallel(mesh, buffers=[tokens.clone()], buffer_seq_dims=[1]),
            pytest.raises(ValueError, match="torch's context_parallel splits sequences between devices, but no states"),
        ):
            model(tokens, position_ids=tokens)
    finally:
        dist.destroy_process_group()
