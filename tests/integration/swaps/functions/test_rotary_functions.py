"""Rotary functions of transformers in whole models: what is swapped, what it computes, and that it can be undone."""

import inspect

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import kernels_ext_npu
import softnpu
from kernels_ext_npu.matching import function_scan
from kernels_ext_npu.swaps import functions
from tests.support import zoo
from tests.support.agreement import assert_agrees
from tests.support.rotary_functions import calls, forward, kernelized


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
        if inspect.isclass(cls) and [use.name for use in function_scan.uses(cls)] == ["apply_rotary_pos_emb"]
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
        functions.revert(model)
    found, before = counts
    layers = model.config.num_hidden_layers
    assert found["npu_rotary_mul"] == 2 * layers
    assert before["cat"] - found.get("cat", 0) == 2 * layers  # those of rotate_half
    changed = {name for name in found if found[name] > before.get(name, 0)}
    assert changed == {"npu_rotary_mul"}


def test_a_step_of_generation_is_one_launch_a_layer_at_any_batch(registered) -> None:
    model = kernelized("qwen3")
    ids = torch.randint(2, 90, (16, 4), device="npu")
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        softnpu.reset_counters()
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert softnpu.counters()["npu_mrope"] == model.config.num_hidden_layers
    assert "npu_rotary_mul" not in softnpu.counters()


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
