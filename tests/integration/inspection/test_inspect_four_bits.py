"""``inspect --lora --nf4``: what adapters on weights in four bits cost, by count."""

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoConfig

from kernels_ext_npu.inspection import inspecting, printing, subject
from kernels_ext_npu.measuring.roofline import SOCS
from tests.integration.inspection.test_inspect_command import SIZES, refusal
from tests.support import zoo

VALUES = 2 * (64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128)  # of the linear layers of two layers of the model


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict]:
    """A step that trains adapters with checkpointing, in four bits and not."""
    config = zoo.build("qwen3").config
    config.intermediate_size = 128
    config.save_pretrained(folder := tmp_path_factory.mktemp("qwen3"))
    count = partial(inspecting.inspect, subject.find(str(folder)), SOCS["910b3"], tokens=32, lora=4, checkpointing=True)
    return {nf4: printing.as_json(count(nf4=nf4)) for nf4 in (False, True)}


def test_layers_in_four_bits_are_served_and_wait_for_nobody(counted: dict[bool, dict]) -> None:
    found = counted[True]
    assert found["inputs"].startswith("1 × 32 tokens, linear layers in NF4, with adapters of rank 4")
    assert {row["kernel"] for row in found["projections"] if row["class"] == "Linear4bit"} == {"lora_linear"}
    _, step = (variant["step"] for variant in found["variants"])
    assert step["host_waits"] == 0
    assert not [remark for remark in found["remarks"] if "not counted" in remark]
    assert found["parameters"] == counted[False]["parameters"]


def test_weights_take_half_a_byte_and_their_scales(counted: dict[bool, dict]) -> None:
    wide, narrow = (counted[nf4]["weight_bytes"] for nf4 in (False, True))
    blocks = VALUES / 64
    assert wide - narrow == pytest.approx(
        VALUES * 1.5 - blocks * (1 + 4 / 256), abs=14 * 4
    )  # scales of scales, rounded


def test_making_weights_moves_bytes_that_are_bounded(counted: dict[bool, dict]) -> None:
    """They are made in the forward, and again when it is computed again, for the backward as well."""
    plain, made = (counted[nf4]["variants"][-1]["step"]["bytes"] for nf4 in (False, True))
    assert (made - plain) / (2 * VALUES) <= 24  # bytes a value; 22.5 of test_bitsandbytes_operators.py, and scales


def test_parts_that_do_not_run_have_as_many_parameters_in_four_bits(tmp_path: Path) -> None:
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "depth": 3, "out_hidden_size": 64}
    text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision).save_pretrained(tmp_path)
    count = partial(inspecting.inspect, subject.find(str(tmp_path)), SOCS["910b3"], tokens=32, lora=4)
    (plain,), (packed,) = ([each for each in count(nf4=nf4).remarks if "reach" in each] for nf4 in (False, True))
    assert packed == plain


def test_four_bits_are_not_trained() -> None:
    assert "--nf4: weights in four bits are not trained; give adapters with --lora, too" in refusal(
        "inspect", "qwen3", "--nf4"
    )


@pytest.mark.long
def test_qwen3_8b_takes_nine_gigabytes() -> None:
    """With checkpointing, at 1 × 4096, 0.2 of them the weights of a layer; LoRA in bfloat16 takes 19.2."""
    inspected = inspecting.inspect(subject.find("Qwen3-8B"), SOCS["910b3"], lora=16, nf4=True, checkpointing=True)
    step = inspected.ends[1].counts["step"]
    assert step is not None
    assert inspected.weights + step.peak < 9.2e9
    assert step.waits == 0
