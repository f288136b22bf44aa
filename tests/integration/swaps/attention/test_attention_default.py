"""Models on the NPU that name no attention implementation: ours computes, and no config says so."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, BeitConfig, BeitModel, PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernels_ext_npu
from kernels_ext_npu.transformers_internals import sdpa_drops_biases
from tests.support import npu_counts, zoo
from tests.support.attention_models import BATCHES, build, on_npu
from tests.support.launches import ATTENTION as LAUNCH
from tests.support.launches import attention_launches as launches

RESTORED = "the model was loaded without use_kernels=True, or its kernels were taken out: call kernelize(model)"


DEFAULTS = {"qwen3": "sdpa", "gpt_oss": "eager"}  # of transformers


def implementation(model: nn.Module) -> str:
    return model.config._attn_implementation


def reasons(model: nn.Module) -> set[str | None]:
    """Why modules of attention keep what they had."""
    return {row.reason for row in kernels_ext_npu.report(model) if row.kind == "attention" and not row.swapped}


# ---- when it is taken ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("use_kernels", [True, False])
@pytest.mark.parametrize("name", DEFAULTS)
def test_a_model_that_is_loaded_to_the_npu_takes_it(registered, tmp_path, name, use_kernels) -> None:
    build(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="npu", use_kernels=use_kernels)
    assert implementation(model) == DEFAULTS[name]
    assert launches(model) == 2
    model.save_pretrained(tmp_path)
    assert "flash" not in (tmp_path / "config.json").read_text()


def test_a_model_that_was_made_before_register_takes_it() -> None:
    model = build().to("npu")
    assert reasons(model) == {"kernels are not registered: call kernels_ext_npu.register() before the model is loaded"}
    assert launches(model) == 2  # torch_npu's scaled_dot_product_attention is the same operator
    before = AttentionInterface._global_mapping["sdpa"]
    kernels_ext_npu.register()
    assert reasons(model) == set()
    kernels_ext_npu.unregister()
    assert AttentionInterface._global_mapping["sdpa"] is before


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("queries", [1, 3, 5])
def test_queries_without_a_mask_are_aligned_to_keys_as_sdpa_aligns_them(registered, queries, is_causal) -> None:
    """Several stand at the first keys, as a prompt in an empty static cache, and a single one at the last."""
    module, generator = build().model.layers[0].self_attn, torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 16, generator=generator)
    key, value = torch.randn(2, 2, 2, 5, 16, generator=generator)
    expected, _ = sdpa_attention_forward(module, query, key, value, None, is_causal=is_causal)
    given = query.npu(), key.npu(), value.npu()
    found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *given, None, is_causal=is_causal)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_vision_towers_with_sequence_lengths_launch_one_attention_a_layer(registered) -> None:
    plain, model = zoo.build("qwen2_5_vl"), zoo.build("qwen2_5_vl").to("npu")
    inputs = zoo.inputs("qwen2_5_vl", plain)
    with torch.no_grad():
        expected = plain(**inputs).logits
        npu_counts.reset()
        found = model(**on_npu(inputs)).logits
        assert npu_counts.read()[LAUNCH] == 4  # two layers of the tower, two of the language model
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
        found = kernels_ext_npu.restore(model)(**on_npu(inputs)).logits  # its windows are calls of their own again
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_biases_of_positions_are_those_of_eager_attention(registered) -> None:
    """Gradients are, too; transformers 5.22.2 takes biases for masks of sdpa where torch_npu is installed."""
    plain, model = zoo.build("swin"), kernels_ext_npu.kernelize(zoo.build("swin").to("npu"))
    plain.set_attn_implementation("eager")
    expected = plain(**zoo.inputs("swin", plain)).last_hidden_state
    found = model(**zoo.inputs("swin", model)).last_hidden_state
    expected.square().mean().backward()
    found.square().mean().backward()
    # both are float32, with sums in another order: values of size one differ by some 1e-6
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        if "bias_table" in name:
            assert one.grad.abs().max() > 0
            torch.testing.assert_close(other.grad.cpu(), one.grad, atol=1e-5, rtol=1e-4)


def remarks(model: nn.Module) -> set[str | None]:
    """What is said of attention that is served."""
    rows = [row for row in kernels_ext_npu.report(model) if row.kind == "attention"]
    assert all(row.swapped for row in rows)
    return {row.reason for row in rows}


def biases_of_positions(learned: bool) -> dict[str, PreTrainedModel]:
    """Build models that add a bias to a mask, in attention, in a layer, in an encoder; or the same without one."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    image = {"image_size": 32, "patch_size": 8}
    layer, encoder = ({f"use_{place}relative_position_bias": learned} for place in ("", "shared_"))
    models = {
        "layer": BeitModel(BeitConfig(**sizes, **image, **layer)),
        "encoder": BeitModel(BeitConfig(**sizes, **image, **encoder)),
        "attention": zoo.build("swin") if learned else zoo.build("vit"),
        "formula": zoo.build("doge") if learned else zoo.build("llama"),
    }
    return {name: kernels_ext_npu.kernelize(model.to("npu")) for name, model in models.items()}


@pytest.mark.parametrize("place", ["attention", "layer", "encoder", "formula"])
def test_a_report_says_where_a_bias_is_added_that_sdpa_drops(registered, place) -> None:
    found = remarks(biases_of_positions(learned=True)[place])
    assert found == {"it adds a learned bias to scores, which transformers' sdpa drops on NPUs"}
    assert remarks(biases_of_positions(learned=False)[place]) == {None}


def test_nothing_is_said_of_biases_that_sdpa_adds(registered, monkeypatch) -> None:
    """transformers' own function, as it is where torch_npu is not installed."""
    monkeypatch.setattr(sdpa_attention, "_is_torch_npu_available", False)
    sdpa_drops_biases.cache_clear()
    found = [remarks(model) for model in biases_of_positions(learned=True).values()]
    sdpa_drops_biases.cache_clear()
    assert found == [{None}] * 4


def test_it_is_taken_again_by_a_model_that_is_given_its_own_name_back(registered) -> None:
    """Continuous batching does so when it ends; nobody asked for eager attention then."""
    model = build("gpt_oss").to("npu")
    before = implementation(model)
    for name in ("npu_flash_attention", before):
        model.set_attn_implementation(name)
    assert implementation(model) == "eager"
    assert launches(model) == 2


# ---- when it is not --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("named", ["eager", "flash_attention_2"])
def test_an_attention_implementation_that_was_asked_for_stays(registered, named) -> None:
    model = build()
    model.set_attn_implementation(named)
    kernels_ext_npu.kernelize(model.to("npu")).train().eval()
    assert implementation(model) == named
    assert reasons(model) == {f"the attention implementation {named} was asked for"}
    assert named != "eager" or launches(model) == 0


@pytest.mark.parametrize("way", ["from_pretrained", "from_config", "config", "set_attn_implementation"])
def test_eager_attention_that_was_asked_for_stays(registered, tmp_path, way) -> None:
    """For gpt-oss transformers takes eager unasked: ours stands in for that, and not for what was asked for."""
    unasked, named = build("gpt_oss"), {"attn_implementation": "eager"}
    unasked.save_pretrained(tmp_path)
    if way == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **named)
    elif way == "from_config":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), **named)
    elif way == "config":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, **named))
    else:
        model = copy.deepcopy(unasked)
        model.set_attn_implementation("eager")
    for each in (model, copy.deepcopy(model)):
        kernels_ext_npu.kernelize(each.to("npu"))
        assert reasons(each) == {"the attention implementation eager was asked for"}
        assert launches(each) == 0
    for other in (unasked, AutoModelForCausalLM.from_config(unasked.config)):
        assert launches(other.to("npu")) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "no operator: scores are capped, which none of torch_npu does"),
        ("t5", "no operator: biases of positions are added to scores"),
        ("bloom", "changes semantics: it does not call its attention by a name, in whose place another could be put"),
    ],
)
def test_a_model_whose_attention_no_operator_computes_keeps_its_own_and_says_why(registered, name, reason) -> None:
    model = zoo.build(name)
    before = implementation(model)
    model = kernels_ext_npu.kernelize(model.to("npu"))
    assert implementation(model) == before
    assert reasons(model) == {reason}


# ---- host waits ------------------------------------------------------------------------------------------------------
# with one kind of masks, and with two
@pytest.mark.parametrize(("name", "checkpointing"), [("qwen3", True), ("gemma3", False), ("llama4", True)])
@pytest.mark.parametrize(("batch", "waits"), [("plain", 0), ("left padding", 1), ("right padding", 1), ("packed", 1)])
def test_the_host_waits_for_lengths_only_and_once_a_step(registered, name, batch, waits, checkpointing) -> None:
    model = build(name).to("npu").train(checkpointing)
    if checkpointing:  # transformers 5.23 has another name for it
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    inputs = on_npu(BATCHES[batch]())
    npu_counts.reset()
    model(**inputs, use_cache=False).logits.sum().backward()
    assert npu_counts.read()["stream_syncs"] == waits


def test_positions_that_are_passed_without_their_name_keep_packed_sequences_apart(registered) -> None:
    """They are the third argument of ``model(input_ids, None, position_ids)``."""
    model = build().to("npu")
    inputs = on_npu(BATCHES["packed"]())
    expected = model(**inputs, use_cache=False).logits
    assert torch.equal(model(inputs["input_ids"], None, inputs["position_ids"], use_cache=False).logits, expected)
    assert not torch.equal(model(inputs["input_ids"], use_cache=False).logits, expected)


# ---- the end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DEFAULTS)
def test_restore_gives_a_model_its_own_until_it_is_kernelized_again(registered, name) -> None:
    model = kernels_ext_npu.kernelize(build(name).to("npu"))
    kernels_ext_npu.restore(model)
    assert reasons(model) == reasons(copy.deepcopy(model)) == {RESTORED}
    assert name == "qwen3" or launches(model.to("cpu").to("npu").train()) == 0
    assert reasons(kernels_ext_npu.kernelize(model)) == set()
    assert launches(model) == 2


@pytest.mark.parametrize("batch", ["plain", "left padding"])
@pytest.mark.parametrize("name", [*DEFAULTS, "gemma3"])
def test_a_restored_model_makes_the_masks_of_transformers(name, batch) -> None:
    model, masks = build(name).to("npu"), []
    for layer in model.model.layers:
        note = lambda _module, _args, kwargs: masks.append(kwargs["attention_mask"])  # noqa: E731
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    inputs = on_npu(BATCHES[batch]())
    expected = model(**inputs).logits
    kernels_ext_npu.restore(kernels_ext_npu.kernelize(model))
    assert torch.equal(model(**inputs).logits, expected)
    plain, restored = masks[:2], masks[2:]
    assert [type(mask) for mask in restored] == [type(mask) for mask in plain]
    assert all(mask is None or torch.equal(mask, other) for mask, other in zip(plain, restored, strict=True))
    kernels_ext_npu.kernelize(model)
    assert launches(model) == 2


@pytest.mark.parametrize("mapping", ["_local_mapping", "_global_mapping"])
@pytest.mark.parametrize("is_before", [False, True], ids=["after register()", "before register()"])
def test_what_wraps_sdpa_by_name_is_called_for_models_that_name_nothing(mapping, is_before) -> None:
    """Frameworks that split sequences do so. The report names the wrapper."""
    calls = []
    with mock.patch.dict(getattr(ALL_ATTENTION_FUNCTIONS, mapping)) as functions:  # afterwards as before register()
        if not is_before:
            kernels_ext_npu.register()
        inner = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def wrapper(module: nn.Module, *args: object, **kwargs: object) -> object:
            calls.append(module)
            return inner(module, *args, **kwargs)

        functions["sdpa"] = wrapper
        kernels_ext_npu.register()
        model = build().to("npu")
        assert launches(model) == len(calls) == 2
        assert reasons(model) == {
            "another library has replaced the attention implementation sdpa: "
            f"{__name__}.test_what_wraps_sdpa_by_name_is_called_for_models_that_name_nothing.<locals>.wrapper"
        }
