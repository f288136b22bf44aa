"""Rotary functions of transformers in whole models: what is swapped, what it computes, and that it can be undone."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
import zoo
from agreement import assert_agrees
from rotary_functions import COUNTED, rotary_functions
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels

import kernels_ext_npu
import softnpu
from kernels_ext_npu import functions
from kernels_ext_npu.matching import find_function_reference, is_kernel_function

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = Path(__file__).resolve().parent.parent
REFUSED = tomllib.loads((TESTS / "data" / "rotary.toml").read_text())
counted = pytest.mark.skipif(transformers.__version__ != COUNTED, reason=f"the functions of {COUNTED} were counted")
pytestmark = pytest.mark.slow


def modeling(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def calls(model: nn.Module) -> list[kernels_ext_npu.Row]:
    return [row for row in kernels_ext_npu.report(model) if row.kind == "rotary calls"]


def kernelized(name: str) -> nn.Module:
    return kernels_ext_npu.kernelize(zoo.build(name).to("npu"))


def forward(model: nn.Module, name: str) -> torch.Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(**{key: value.to(device) for key, value in zoo.inputs(name, model).items()}).logits


# ---- which functions -------------------------------------------------------------------------------------------------
@counted
def test_every_rotary_function_is_served_or_refused_with_a_reason() -> None:
    kept = {name for name, function in rotary_functions().items() if find_function_reference(function) is None}
    listed = [name for names in REFUSED.values() for name in names]
    assert len(set(listed)) == len(listed)
    methods = {name for name in listed if "." in name}
    assert kept == set(listed) - methods
    for name in methods:
        module, _, path = name.partition(":")
        (package,) = {p.parent.name for p in Path(transformers.__path__[0]).glob(f"models/*/modeling_{module}.py")}
        owner = importlib.import_module(f"transformers.models.{package}.modeling_{module}")
        for part in path.split("."):
            owner = getattr(owner, part)
        assert inspect.isfunction(owner)


@counted
def test_all_that_transformers_decorates_is_served_by_what_it_does() -> None:
    decorated = {name: f for name, f in rotary_functions().items() if is_kernel_function(f)}
    assert Counter(find_function_reference(function).layer for function in decorated.values()) == {
        "RotaryPosEmb": 104,
        "RotaryPosEmbCastBack": 6,
        "RotaryPosEmbFloat32": 4,
        "RotaryPosEmbTablesInFloat32": 1,
        "RotaryPosEmbReversed": 1,
        "RotaryPosEmbHalfWidth": 1,
        "RotaryPosEmbInterleavedHalfWidth": 1,
    }


@counted
def test_the_undecorated_families_are_served() -> None:
    found = {n: find_function_reference(f) for n, f in rotary_functions().items() if not is_kernel_function(f)}
    assert Counter(reference.function.__name__ for reference in found.values() if reference) == {
        "qwen2_vl_vision": 23,
        "gpt_neox": 16,
        "llama": 11,
        "deepseek_v3": 10,
        "cohere": 5,
        "gemma4": 4,
        "glm4": 4,
        "dinov3_vit": 3,
        "glmasr": 3,
        "ernie4_5": 2,
        "glm4v": 2,
        "gptj": 2,
        "phi3": 2,
        "sam3": 2,
        "blt": 1,
        "deepseek_v2": 1,
        "deepseek_v4": 1,
        "ernie4_5_vl_moe": 1,
        "helium": 1,
        "llama4": 1,
        "llama4_vision": 1,
        "minimax_m3_vl_vision": 1,
        "mistral_large4": 1,
        "muse_glimmer_assistant": 1,
        "nemotron": 1,
        "qwen4_exp": 1,
    }


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("qwen3", "RotaryPosEmb"),
        ("nanochat", "RotaryPosEmbReversed"),  # the same body as Llama's, and a helper with the other sign
        ("gpt_oss", "RotaryPosEmbHalfWidth"),  # these two have the same body and shapes, and helpers that differ
        ("openai_privacy_filter", "RotaryPosEmbInterleavedHalfWidth"),
        ("blt", "RotaryPosEmbInterleaved"),  # the same body as Llama's, and a helper for neighbours
        ("glm4v", "RotaryPosEmbInterleavedPartial"),  # the same body as GPT-NeoX, and a helper for neighbours
    ],
)
def test_functions_that_look_alike_get_the_layer_of_what_they_do(module, layer) -> None:
    assert find_function_reference(modeling(module).apply_rotary_pos_emb).layer == layer


SOURCE = '''
import torch
from transformers.integrations import use_kernel_forward_from_hub

def double(function):
    return lambda *a, **k: [2 * x for x in function(*a, **k)]

def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat({halves}, dim=-1)

{decorator}
def apply_rotary_pos_emb({parameters}):
    """A docstring, and {changed}."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    a = (q * cos) {operator} (rotate_half(q) * sin)
    b = (k * cos) + (rotate_half(k) * sin)
    return a, b

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)
'''
USUAL = {
    "halves": "(-x2, x1)",
    "decorator": "",
    "parameters": "q, k, cos, sin, unsqueeze_dim=1",
    "operator": "+",
    "changed": "nothing",
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A modeling file that is written as Llama's, with changes."""

    def write(**changes: str) -> ModuleType:
        (tmp_path / "modeling_written.py").write_text(SOURCE.format(**USUAL | changes))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "modeling_written", raising=False)
        return importlib.import_module("modeling_written")

    yield write
    kernels_ext_npu.unregister()
    sys.modules.pop("modeling_written", None)


@pytest.mark.parametrize(
    ("changes", "matches"),
    [
        ({}, True),
        ({"decorator": '@use_kernel_forward_from_hub("rotary_pos_emb")'}, True),
        ({"decorator": "@double"}, False),
        ({"decorator": '@use_kernel_forward_from_hub("rotary_pos_emb")\n@double'}, False),
        ({"halves": "(x2, x1)"}, False),
        ({"operator": "-"}, False),
        ({"parameters": "q, k, cos, sin, unsqueeze_dim=2"}, False),
        ({"parameters": "q, k, sin, cos, unsqueeze_dim=1"}, False),  # callers may name them
        ({"parameters": "q, k, cos, sin, *, unsqueeze_dim=1"}, False),
    ],
)
def test_what_is_written_otherwise_does_not_match(written, changes, matches) -> None:
    reference = find_function_reference(written(**changes).apply_rotary_pos_emb)
    assert (reference is not None) == matches
    assert reference is None or reference.layer == "RotaryPosEmb"


def test_a_decorated_function_that_matches_nothing_gets_no_kernel_for_the_npu(written) -> None:
    """Also where somebody has one for all that transformers decorates as rotary_pos_emb."""
    module = written(decorator='@use_kernel_forward_from_hub("rotary_pos_emb")', operator="-")
    kernels_ext_npu.register()
    table = hub_kernels.get_kernel_mapping_transformers()
    before = table["rotary_pos_emb"]
    table["rotary_pos_emb"] = before | {"npu": table["RotaryPosEmb"]["npu"]}
    try:
        model = module.Attention().to("npu")
        vars(model)["_kernel_funcs"] = {"rotary_pos_emb": module.apply_rotary_pos_emb}
        kernels_ext_npu.kernelize(model)
        (row,) = calls(model)
        assert (row.swapped, row.kernel, row.reason) == (False, None, "no kernel computes what it computes")
        forward = vars(module.apply_rotary_pos_emb).get("forward")
        assert forward is None or forward.__func__ is type(module.apply_rotary_pos_emb).forward
        x, cos = torch.randn(1, 2, 3, 8, device="npu"), torch.randn(1, 3, 8, device="npu")
        found = model(x, x, cos, cos)
        for a, b in zip(found, model(x.cpu(), x.cpu(), cos.cpu(), cos.cpu())):
            torch.testing.assert_close(a.cpu(), b)
    finally:
        table["rotary_pos_emb"] = before
    kernels_ext_npu.unregister()
    assert type(module.apply_rotary_pos_emb).kernel_layer_name == "rotary_pos_emb"
    assert not [layer for layer in table if "except npu" in layer]


def test_code_that_is_no_part_of_transformers_is_served_too(written, registered) -> None:
    module = written()
    model = kernels_ext_npu.kernelize(module.Attention().to("npu"))
    (row,) = calls(model)
    assert (row.swapped, row.kernel, row.path) == (True, "RotaryPosEmb", "apply_rotary_pos_emb")


# ---- in models -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3", {"RotaryPosEmb"}),
        ("llama", {"RotaryPosEmb"}),
        ("olmo2", {"RotaryPosEmbCastBack"}),
        ("modernbert", {"RotaryPosEmbFloat32"}),
        ("nanochat", {"RotaryPosEmbReversed"}),
        ("gpt_oss", {"RotaryPosEmbHalfWidth"}),
        ("gemma3", {"RotaryPosEmb"}),
        ("gemma3n_text", {"RotaryPosEmbSingle"}),
        ("gemma4", {"RotaryPosEmbSingle"}),
        ("phi3", {"RotaryPosEmbPartial"}),
        ("qwen3_next", {"RotaryPosEmbPartial"}),
        ("glm4", {"RotaryPosEmbInterleavedRepeatedPartial"}),
        ("helium", {"RotaryPosEmbInterleavedRepeated"}),
        ("ernie4_5", {"RotaryPosEmbInterleavedRepeatedFloat32"}),
        ("moonshine", {"RotaryPosEmbInterleavedRepeatedPartial"}),
        ("deepseek_v3", {"RotaryPosEmb", "RotaryPosEmbDeinterleaved"}),
        ("deepseek_v4", {"RotaryPosEmbInterleavedTail"}),
        ("qwen2_5_vl", {"RotaryPosEmb", "VisionRotaryPosEmb"}),
        ("qwen3_vl", {"RotaryPosEmb", "VisionRotaryPosEmb"}),
        ("glm4v", {"RotaryPosEmbInterleavedPartial", "VisionRotaryPosEmb"}),
        ("pixtral", {"RotaryPosEmb"}),
        ("llama4_text", {"RotaryEmbComplexBySequence"}),
        ("llama4", {"RotaryEmbComplexBySequence", "VisionRotaryEmbComplex"}),
        ("dinov3_vit", {"RotaryPosEmbPatches"}),
    ],
)
# padded caches of hybrids
@pytest.mark.filterwarnings("ignore:npu_fusion_attention_v3. atten_mask leaves a row nothing")
def test_models_give_the_logits_gradients_and_tokens_of_their_originals(registered, name, layers) -> None:
    model = kernelized(name)
    rows = calls(model)
    assert {row.kernel for row in rows} == layers
    assert all(row.swapped and row.reason is None for row in rows)
    softnpu.reset_counters()
    assert_agrees(name, model)
    assert softnpu.counters()["npu_rotary_mul"] > 0
    kernels_ext_npu.restore(model)
    assert not any(row.swapped for row in calls(model))


def test_openai_privacy_filter(registered) -> None:
    """It is not in the zoo: half-width cos as gpt-oss, and neighbours."""
    from transformers.models.openai_privacy_filter import modeling_openai_privacy_filter as module

    attention = next(
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and [use.name for use in functions.uses(cls)] == ["apply_rotary_pos_emb"]
    )
    model = attention.__new__(attention)
    nn.Module.__init__(model)
    model.weight = nn.Parameter(torch.ones(1, device="npu"))
    kernels_ext_npu.kernelize(model)
    (row,) = calls(model)
    assert (row.swapped, row.kernel) == (True, "RotaryPosEmbInterleavedHalfWidth")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_without_rotation_have_no_rows_for_it(registered, name) -> None:
    assert not calls(kernelized(name))


def test_what_has_no_kernel_keeps_its_forward_and_says_so(registered) -> None:
    from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoRoPEAttention

    model = Sam2VideoRoPEAttention.__new__(Sam2VideoRoPEAttention)
    nn.Module.__init__(model)
    model.weight = nn.Parameter(torch.ones(1, device="npu"))
    kernels_ext_npu.kernelize(model)
    (row,) = calls(model)
    assert (row.swapped, row.kernel, row.reason) == (False, None, "no kernel computes what it computes")
    assert row.is_candidate


def test_a_decoder_layer_launches_two_and_nothing_else_for_it(registered) -> None:
    model = kernelized("qwen3")
    counts = []
    for _ in range(2):  # with kernels, and without
        softnpu.reset_counters()
        forward(model, "qwen3")
        counts.append(softnpu.counters())
        kernels_ext_npu.functions.restore(model)
    found, before = counts
    layers = model.config.num_hidden_layers
    assert found["npu_rotary_mul"] == 2 * layers
    assert before["cat"] - found.get("cat", 0) == 2 * layers  # those of rotate_half
    changed = {name for name in found if found[name] > before.get(name, 0)}
    assert changed == {"npu_rotary_mul"}


def test_a_step_of_generation_is_two_launches_a_layer_at_any_batch(registered) -> None:
    model = kernelized("qwen3")
    ids = torch.randint(2, 90, (16, 4), device="npu")
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        softnpu.reset_counters()
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert softnpu.counters()["npu_rotary_mul"] == 2 * model.config.num_hidden_layers


def test_left_padded_batches_are_right(registered, checkpoint) -> None:
    reference = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), device_map="npu", use_kernels=True)
    ids = torch.randint(2, 90, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :2] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
        found = model(*[ids.to("npu")], attention_mask=mask.to("npu"), position_ids=positions.to("npu")).logits
    # float32 through two layers, as in agreement.py
    assert (found.cpu()[mask.bool()] - expected).norm() <= 1e-5 * expected.norm()
    options = {"max_new_tokens": 5, "do_sample": False}
    tokens = model.generate(ids.to("npu"), attention_mask=mask.to("npu"), **options).cpu()
    assert torch.equal(tokens, reference.generate(ids, attention_mask=mask, **options))


def test_a_swapped_model_compiles_to_one_graph(registered) -> None:
    torch._dynamo.reset()
    model = kernelized("phi3")
    ids = zoo.inputs("phi3", model)["input_ids"].to("npu")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


# ---- one object for the process --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3", "phi3"])  # decorated by transformers, and not
def test_another_model_on_the_cpu_gives_what_it_gave(name) -> None:
    twin = zoo.build(name)
    expected = forward(twin, name)
    kernels_ext_npu.register()
    kernelized(name)
    assert torch.equal(forward(twin, name), expected)
    assert {row.reason.partition(":")[0] for row in calls(twin)} == {"it is on cpu"}
    kernels_ext_npu.unregister()
    assert torch.equal(forward(twin, name), expected)


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_models_of_one_architecture_share_it_and_the_report_says_so(registered, name) -> None:
    model, plain = kernelized(name), zoo.build(name).to("npu")
    assert all(row.swapped for row in [*calls(model), *calls(plain)])
    assert " ".join(str(kernels_ext_npu.report(model)).split()).count(functions.SHARED) == 1
    expected = forward(zoo.build(name), name)
    for both in (model, plain):
        assert (forward(both, name).cpu() - expected).norm() <= 1e-5 * expected.norm()
    kernels_ext_npu.restore(plain)
    for row in [*calls(model), *calls(plain)]:
        assert not row.swapped
        assert "restore() was called" in row.reason
    assert functions.SHARED[:20] not in str(kernels_ext_npu.report(model))
    kernels_ext_npu.kernelize(model)
    assert all(row.swapped for row in calls(plain))


@pytest.mark.parametrize("name", ["qwen3", "phi3", "exaone4"])
def test_copies_and_pickles_call_the_function_of_the_process(registered, name, tmp_path) -> None:
    model = kernelized(name)
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (twin, loaded):
        assert all(row.swapped for row in calls(other))
        torch.testing.assert_close(forward(other, name), forward(model, name))


def state() -> dict[str, object]:
    """What transformers' files hold under the names of rotary functions, and what their classes say."""
    found: dict[str, object] = {}
    for name in ("qwen3", "phi3", "glm4", "deepseek_v3", "qwen2_5_vl", "nanochat", "llama4"):
        for key, value in vars(modeling(name)).items():
            if "rotary" in key and not inspect.isclass(value):
                marks = {k: v for k, v in vars(type(value)).items() if k.startswith(("kernel_", "__red", "__mod"))}
                found[f"{name}.{key}"] = value, marks, dict(vars(value)) if is_kernel_function(value) else None
    return found


def test_unregister_leaves_transformers_as_it_was() -> None:
    table = hub_kernels.get_kernel_mapping_transformers()
    for name in ("qwen3", "phi3"):
        function = modeling(name).apply_rotary_pos_emb
        if is_kernel_function(function):
            vars(function).pop("forward", None)
    before, layers = state(), {layer: dict(entry) for layer, entry in table.items()}
    attached = [dict(vars(m).get("_kernel_funcs", {})) for m in zoo.build("deepseek_v3").modules()]
    models = [kernelized(name) for name in ("qwen3", "phi3", "glm4", "deepseek_v3", "qwen2_5_vl", "nanochat")]
    assert state() != before
    kernels_ext_npu.unregister()
    assert state() == before
    assert {layer: dict(entry) for layer, entry in table.items()} == layers
    assert [dict(vars(m).get("_kernel_funcs", {})) for m in models[3].modules()] == attached
    for model in models:
        assert not any(row.swapped for row in calls(model))
    kernels_ext_npu.restore(models[1])


def test_the_kernels_of_other_devices_stay(registered) -> None:
    table = hub_kernels.get_kernel_mapping_transformers()
    kernelized("qwen3")
    assert table["RotaryPosEmb"].keys() == table["rotary_pos_emb"].keys() | {"npu"}
    assert all(table["RotaryPosEmb"][device] == entry for device, entry in table["rotary_pos_emb"].items())


def test_functions_that_transformers_attaches_to_nothing_are_attached(registered) -> None:
    plain = zoo.build("exaone4")
    assert not [m for m in plain.modules() if "_kernel_funcs" in vars(m)]
    model = kernels_ext_npu.kernelize(plain.to("npu"))
    assert calls(model)
    assert all(row.swapped for row in calls(model))
