"""Models on the NPU that name no attention implementation: which take ours, when, and when no more."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

import kernels_ext_npu
import softnpu
from tests.support import zoo
from tests.support.attention_models import BATCHES, MODELS, ids, on_npu

NAME = "npu_flash_attention"
LAUNCH = "npu_fusion_attention_v3"
RESTORED = "the model was loaded without use_kernels=True, or its kernels were taken out: call kernelize(model)"


def build(name: str = "qwen3") -> PreTrainedModel:
    """Make a model as a user does, who says nothing of attention."""
    cls, config, own = MODELS[name]
    small = zoo.SMALL | {"vocab_size": 64, "sliding_window": 8} | own
    torch.manual_seed(0)
    return cls(zoo.configure(config, {k: v for k, v in own.items() if v is not None}, small)).eval()


def implementation(model: nn.Module) -> str:
    return model.config._attn_implementation


def launches(model: nn.Module) -> int:
    softnpu.reset_counters()
    with torch.no_grad():
        model(ids(2).to(model.device))
    return softnpu.counters().get(LAUNCH, 0)


def reasons(model: nn.Module) -> set[str | None]:
    """Why modules of attention keep what they had."""
    return {row.reason for row in kernels_ext_npu.report(model) if row.kind == "attention" and not row.swapped}


# ---- when it is taken ------------------------------------------------------------------------------------------------
def made_on_the_npu() -> PreTrainedModel:
    with torch.device("npu"):
        return build()


def inside_another_module() -> PreTrainedModel:
    return nn.ModuleDict({"model": build()}).to("npu")["model"]


WAYS: dict[str, Callable[[], PreTrainedModel]] = {
    "moved": lambda: build().to("npu"),
    "moved by its device": lambda: build().npu(),
    "made there": made_on_the_npu,
    "moved with what it is in": inside_another_module,
    "without weights at first": lambda: build().to("meta").to_empty(device="npu"),
    "kernelized": lambda: kernels_ext_npu.kernelize(build().to("npu")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_on_the_npu_takes_it(registered, way) -> None:
    model = WAYS[way]()
    assert implementation(model) == NAME
    assert reasons(model) == set()
    assert launches(model) == 2


@pytest.mark.parametrize("use_kernels", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])  # by default sdpa, and eager
def test_a_model_that_is_loaded_to_the_npu_takes_it(registered, tmp_path, name, use_kernels) -> None:
    build(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="npu", use_kernels=use_kernels)
    assert implementation(model) == NAME
    assert launches(model) == 2
    model.save_pretrained(tmp_path)
    assert "flash" not in (tmp_path / "config.json").read_text()


def test_a_model_that_was_made_before_register_takes_it_when_kernelized() -> None:
    model = build().to("npu")
    kernels_ext_npu.register()
    assert reasons(model) == {"the model was made before register(): call kernelize(model)"}
    assert implementation(kernels_ext_npu.kernelize(model)) == NAME


def test_a_model_that_waits_takes_it_when_it_is_first_called(npu_weights) -> None:
    """As one does whose weights another library has moved, one by one."""
    kernels_ext_npu.register(everywhere=True)
    model = npu_weights(build())
    assert implementation(model) == "sdpa"
    assert launches(model) == 2
    assert implementation(model) == NAME


@pytest.fixture
def npu_weights() -> Callable[[nn.Module], nn.Module]:
    def move(model: nn.Module) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.npu()
        return model

    return move


@pytest.mark.parametrize("kernels", [["RMSNorm"], ["FlashAttention"]])
def test_kernels_decides(kernels) -> None:
    kernels_ext_npu.register(kernels=kernels)
    model = kernels_ext_npu.kernelize(build().to("npu"))
    is_left_out = "FlashAttention" not in kernels
    assert implementation(model) == ("sdpa" if is_left_out else NAME)
    assert reasons(model) == ({"register(kernels=['RMSNorm']) leaves FlashAttention out"} if is_left_out else set())


def test_a_model_follows_its_parts(registered, tmp_path) -> None:
    zoo.build("qwen2_5_vl").save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, device_map="npu")
    configs = [model.config, model.config.text_config, model.config.vision_config]
    assert [config._attn_implementation for config in configs] == [NAME] * 3
    kernels_ext_npu.restore(model)
    assert [config._attn_implementation for config in configs] == ["sdpa"] * 3


# ---- when it is not --------------------------------------------------------------------------------------------------
def test_a_model_on_the_cpu_keeps_its_own(registered) -> None:
    model = build()
    assert implementation(model) == "sdpa"
    assert reasons(model) == {"it is on cpu: load with device_map='npu', or move the model and call kernelize(model)"}


def test_a_model_that_leaves_the_npu_has_its_own_again(registered) -> None:
    model = build().to("npu").to("cpu")
    assert implementation(model) == "sdpa"
    assert implementation(model.to("npu")) == NAME


@pytest.mark.parametrize("move_first", [True, False])
@pytest.mark.parametrize("named", ["eager", "sdpa"])
def test_a_name_that_was_chosen_stays(registered, named, move_first) -> None:
    model = build()
    if move_first:
        model.to("npu")
    model.set_attn_implementation(named)
    kernels_ext_npu.kernelize(model.to("npu")).train().eval()
    assert implementation(model) == named
    assert reasons(model) == {f"the attention implementation {named} was asked for"}


def test_a_name_that_was_written_into_the_config_stays(registered) -> None:
    model = build().to("npu")
    model.config._attn_implementation = "sdpa"
    assert implementation(kernels_ext_npu.kernelize(model)) == "sdpa"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "no operator: scores are capped, which none of torch_npu does"),
        ("t5", "no operator: biases of positions are added to scores"),
        ("bloom", "changes semantics: it does not call its attention by a name, in whose place another could be put"),
    ],
)
def test_what_no_operator_computes_keeps_its_own_and_says_why(registered, name, reason) -> None:
    model = zoo.build(name)
    before = implementation(model)
    model = kernels_ext_npu.kernelize(model.to("npu"))
    assert implementation(model) == before
    assert reasons(model) == {reason}


@pytest.mark.parametrize("name", ["deepseek_v4", "minimax"])
def test_a_class_whose_masks_are_not_for_its_keys_keeps_its_own(registered, name) -> None:
    model = zoo.build(name)
    before = implementation(model)
    assert implementation(kernels_ext_npu.kernelize(model.to("npu"))) == before
    assert len(reasons(model)) == 1


# ---- host waits ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # with one kind of masks, and with two
@pytest.mark.parametrize(("batch", "waits"), [("plain", 0), ("left padding", 1), ("right padding", 1), ("packed", 1)])
def test_the_host_waits_for_lengths_only_and_once_a_step(registered, name, batch, waits, checkpointing) -> None:
    model = build(name).to("npu").train(checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = on_npu(BATCHES[batch]())
    softnpu.reset_counters()
    model(**inputs, use_cache=False).logits.sum().backward()
    assert softnpu.counters()["stream_syncs"] == waits


def test_positions_without_their_name_are_looked_at(registered) -> None:
    """As in ``model(input_ids, None, position_ids)``: packed sequences stay apart."""
    model = build().to("npu")
    inputs = on_npu(BATCHES["packed"]())
    expected = model(**inputs, use_cache=False).logits
    assert torch.equal(model(inputs["input_ids"], None, inputs["position_ids"], use_cache=False).logits, expected)
    assert not torch.equal(model(inputs["input_ids"], use_cache=False).logits, expected)


# ---- weights of attention --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_who_asks_for_weights_gets_those_of_eager_attention(registered, name) -> None:
    model = build(name)
    ours = copy.deepcopy(model).to("npu")
    model.set_attn_implementation("eager")
    mask = torch.ones_like(ids(2))
    mask[0, :5] = 0
    expected = model(ids(2), attention_mask=mask, output_attentions=True)
    found = ours(ids(2).npu(), attention_mask=mask.npu(), output_attentions=True)
    assert implementation(ours) == NAME
    seen = mask.bool()
    torch.testing.assert_close(found.logits.cpu()[seen], expected.logits[seen], atol=1e-5, rtol=1e-5)
    for weights, truth in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(weights.cpu()[1], truth[1], atol=1e-5, rtol=1e-5)


# ---- the end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "default"), [("qwen3", "sdpa"), ("gpt_oss", "eager")])
def test_restore_gives_a_model_its_own_until_it_is_kernelized_again(registered, name, default) -> None:
    model = kernels_ext_npu.kernelize(build(name).to("npu"))
    kernels_ext_npu.restore(model)
    assert implementation(model) == default
    assert reasons(model) == {RESTORED}
    assert implementation(model.to("cpu").to("npu").train()) == default
    assert implementation(kernels_ext_npu.kernelize(model)) == NAME


def test_unregister_gives_models_and_their_copies_their_own(registered) -> None:
    model = build().to("npu")
    twin = copy.deepcopy(model)
    assert launches(twin) == 2
    kernels_ext_npu.unregister()
    assert implementation(model) == implementation(twin) == "sdpa"
    assert "__deepcopy__" not in vars(PreTrainedConfig)
    assert "__reduce_ex__" not in vars(PreTrainedConfig)


def test_what_is_pickled_names_what_every_process_knows(registered) -> None:
    config = build("gpt_oss").to("npu").config
    assert pickle.loads(pickle.dumps(config))._attn_implementation == "eager"
    assert config._attn_implementation == NAME
    config._attn_implementation = "sdpa"
    assert pickle.loads(pickle.dumps(config))._attn_implementation == "sdpa"


def test_the_copy_of_a_config_is_for_a_model_of_its_own(registered) -> None:
    """As from_pretrained(config=model.config) copies it."""
    model = build().to("npu")
    other = type(model)(copy.deepcopy(model.config))
    assert implementation(other.to("cpu")) == "sdpa"
    assert implementation(model) == NAME
    kernels_ext_npu.restore(model)
    assert implementation(other.to("npu")) == NAME
