"""``npu_flash_attention``: who gets it, by which names, what it computes, and how it ends."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    SamConfig,
    SamModel,
    modeling_flash_attention_utils,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernels_ext_npu
from tests.support import zoo
from tests.support.attention_models import MODELS, NAME, build, ids, on_npu, pair
from tests.support.launches import attention_launches as launches
from tests.support.nearness import assert_each_near

ON_HUB = "kernels-ext-npu/FlashAttention"
FOR_ACCELERATE = "kernels-ext-npu/flash-attn"
# what may be asked for, and what configs name then
IN_CONFIG = {
    NAME: NAME,
    ON_HUB: NAME,
    f"{ON_HUB}@v1": NAME,
    f"{ON_HUB}@main:attention_forward": NAME,
    FOR_ACCELERATE: FOR_ACCELERATE,
}
# with a window, with two kinds of masks, with sinks, with heads of values that are smaller
SERVED = ["qwen3", "mistral", "gemma3", "gpt_oss", "deepseek_v3"]
# Both are float32, with sums in another order: values of size one differ by some 1e-6.
assert_equal = partial(assert_each_near, tolerance=5e-6)


def pair_by_name(name: str, implementation: str = NAME) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build a model twice: with eager attention on the CPU, and on the NPU, where it is told to take another one."""
    model, _ = pair(name)
    ours = copy.deepcopy(model).to("npu")
    ours.set_attn_implementation(implementation)
    return model, ours


def rows(model: nn.Module) -> list[kernels_ext_npu.Row]:
    return [row for row in kernels_ext_npu.report(model) if row.kind == "attention" and row.swapped]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a model with sinks, whose class lists the flash attentions that it gets on with."""
    pair("gpt_oss")[0].save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_biases_of_positions_are_for_a_batch_with_its_padding(registered, device) -> None:
    model, ours = zoo.build("t5"), zoo.build("t5").to(device)
    model.set_attn_implementation("eager")
    ours.set_attn_implementation(NAME)
    assert_equal(zoo.logits("t5", ours), zoo.logits("t5", model))  # with padding before the tokens of the first row
    elsewhere, here = "in torch, since it is on cpu", "in torch, where biases of positions are added to scores"
    assert {row.reason for row in rows(ours)} == {elsewhere if device == "cpu" else here}


@pytest.mark.parametrize(("name", "is_named"), [*((name, True) for name in SERVED), ("gpt_oss", False)])
def test_weights_are_those_of_eager_attention(registered, name, is_named) -> None:
    """Rows that see a key are compared. Without a name ours stands in for the model's own formula."""
    model, ours = pair_by_name(name) if is_named else (build(name), build(name).to("npu"))
    mask = torch.ones_like(ids(2))
    mask[0, :5] = 0
    inputs = {"input_ids": ids(2), "attention_mask": mask, "use_cache": False, "output_attentions": True}
    expected, found = model(**inputs), ours(**on_npu(inputs))
    assert_equal(found.logits.cpu()[mask.bool()], expected.logits[mask.bool()])
    for weights, truth in zip(found.attentions, expected.attentions, strict=True):
        by_row, true_by_row = (each.transpose(1, 2)[mask.bool().to(each.device)] for each in (weights, truth))
        assert_equal(by_row, true_by_row)


# ---- names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("named", IN_CONFIG)
def test_it_can_be_named_wherever_an_implementation_is_named(registered, saved, named) -> None:
    """Some classes list the flash attentions that they get on with, and take ours."""
    loaded = AutoModelForCausalLM.from_pretrained(saved, device_map="npu", attn_implementation=named)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved), attn_implementation=named).to("npu")
    by_config = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved, attn_implementation=named)).to("npu")
    changed = AutoModelForCausalLM.from_pretrained(saved, device_map="npu", attn_implementation="eager")
    changed.set_attn_implementation(named)
    for model in (loaded, made, by_config, changed):
        assert model.config._attn_implementation == IN_CONFIG[named]
        assert launches(model) == 2
    loaded.save_pretrained(saved)
    assert "flash" not in (saved / "config.json").read_text()


@pytest.mark.parametrize("named", [ON_HUB, FOR_ACCELERATE])
def test_it_can_be_named_for_a_part_of_a_model(registered, tmp_path, named) -> None:
    zoo.build("qwen2_5_vl").save_pretrained(tmp_path)
    by_part = {"vision_config": named, "text_config": "sdpa", "": "sdpa"}
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=by_part)
    changed = AutoModelForImageTextToText.from_pretrained(tmp_path)
    changed.set_attn_implementation(by_part)
    for model in (loaded, changed):
        config = model.config
        assert config._attn_implementation == config.text_config._attn_implementation == "sdpa"
        vision = config.vision_config._attn_implementation, model.model.visual.config._attn_implementation
        assert vision == (IN_CONFIG[named],) * 2
        assert {row.class_name for row in rows(model)} == {"Qwen2_5_VLVisionAttention"}
        kernels_ext_npu.restore(model)
        assert config.vision_config._attn_implementation == "sdpa"


def test_accelerate_takes_a_name_of_it_for_sequence_parallelism(registered, monkeypatch) -> None:
    """DeepSpeed looks it up in transformers' table, after an import of what has a slash in it.

    That loads nothing from the Hub where torch_npu is installed: transformers has functions of its own for NPUs.
    """
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=FOR_ACCELERATE)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    modeling_flash_attention_utils.lazy_import_flash_attention(FOR_ACCELERATE)
    assert ALL_ATTENTION_FUNCTIONS[FOR_ACCELERATE] is ALL_ATTENTION_FUNCTIONS[NAME]


def test_the_name_is_unknown_where_the_kernel_is_not_registered(checkpoint) -> None:
    kernels_ext_npu.register(kernels=["RMSNorm"])
    assert NAME not in AttentionInterface._global_mapping
    assert NAME not in AttentionMaskInterface._global_mapping
    with pytest.raises(ValueError, match=f'attn_implementation="{NAME}"` is not supported'):
        AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), attn_implementation=NAME)


def test_the_forward_raises_where_the_kernel_cannot_be_loaded(checkpoint) -> None:
    kernels_ext_npu.register(source="hub")
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), device_map="npu", attn_implementation=NAME)
    with pytest.raises(ValueError, match="not available in the local cache"):
        launches(model)


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_a_class_that_calls_its_attention_by_no_name_keeps_it_and_says_so(registered, name) -> None:
    config = zoo.build(name).config
    config._attn_implementation = ON_HUB
    with pytest.warns(UserWarning, match=f"{NAME}: .* does not call its attention by name, and keeps"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation in ("eager", "sdpa")
    assert rows(model) == []
    model(**zoo.inputs(name, model))  # computes


def test_sub_configs_without_a_model_of_their_own_are_named_too(registered) -> None:
    tower = {"hidden_size": 32, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}
    config = SamConfig(vision_config=tower | {"global_attn_indexes": [0]})
    by_part = {"": ON_HUB, "prompt_encoder_config": ON_HUB, "mask_decoder_config": ON_HUB, "vision_config": "sdpa"}
    config._attn_implementation = by_part
    model = SamModel(config)
    named = [config, config.prompt_encoder_config, config.mask_decoder_config]
    assert [part._attn_implementation for part in named] == [NAME] * 3
    assert {row.class_name for row in rows(model)} == {"SamAttention"}
    kernels_ext_npu.unregister()
    assert [part._attn_implementation for part in named] == ["sdpa"] * 3


# ---- the end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", [kernels_ext_npu.restore, lambda model: kernels_ext_npu.unregister()])
@pytest.mark.parametrize("named", [NAME, FOR_ACCELERATE])
@pytest.mark.parametrize(("name", "default"), [("qwen3", "sdpa"), ("gpt_oss", "eager")])
def test_a_model_has_again_what_it_had_before(registered, tmp_path, name, default, named, end) -> None:
    """Or what transformers gives it by itself, where it was loaded with the name."""
    pair(name)[0].save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="npu", attn_implementation=named)
    changed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="npu", attn_implementation="eager")
    changed.set_attn_implementation(named)
    assert launches(loaded) == launches(changed) == 2
    end(loaded)
    end(changed)
    assert (loaded.config._attn_implementation, changed.config._attn_implementation) == (default, "eager")
    assert launches(changed) == 0
    launches(loaded)  # computes


def test_a_copy_of_a_model_is_told_so_and_can_be_restored(registered) -> None:
    twin = copy.deepcopy(pair_by_name("mistral")[1])
    assert launches(twin) == 2
    kernels_ext_npu.unregister()
    with pytest.raises(KeyError, match=f"`{NAME}` is not a valid attention implementation"):
        launches(twin)
    assert kernels_ext_npu.restore(twin).config._attn_implementation == "sdpa"
    launches(twin)  # computes


# ---- the report ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"llama4"}))
def test_the_report_says_which_modules_it_computes(registered, name) -> None:
    model = pair_by_name(name)[1]
    served = rows(model)
    assert [row.path for row in served] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    capped = "in torch, since scores are capped, which none of torch_npu does" if name == "gemma2" else None
    assert {(row.kernel, row.swapped, row.reason) for row in served} == {(NAME, True, capped)}
    assert "2 of 2 attention" in kernels_ext_npu.report(model).summary()
    assert launches(model) == (0 if capped else 2)
