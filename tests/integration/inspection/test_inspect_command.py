"""``kernels-ext-npu inspect`` as a stranger runs it."""

import io
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants
from matplotlib import image
from rich.console import Console
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.inspection import inspecting, printing, subject
from kernels_ext_npu.inspection.counting import phases
from kernels_ext_npu.measuring import roofline
from tests.integration.whole_models import own_code
from tests.support.commands import refusal, report, run, said
from tests.support.sizes import sizes

ENDS = inspecting.ORIGINAL, inspecting.ALL
SIZES = sizes(64, 128, heads=4, keys=2, width=16, layers=1, words=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AutoConfig.for_model("qwen3", **SIZES).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def printed(found: inspecting.Inspection) -> str:
    console = Console(record=True, width=80, file=io.StringIO())
    printing.show(found, console)
    return " ".join(console.export_text().split())


def test_a_checkpoint_without_weights(folder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = run("inspect", folder, "--tokens", 32, "--plot", plot)
    output = " ".join(result.output.split())
    assert "Qwen3ForCausalLM" in output
    assert (
        "5 of 5 norms, 1 of 1 gated MLPs, 1 of 1 rotary calls, 1 of 1 rotary tables, 1 of 1 attention, "
        "1 of 1 heads swapped" in output
    )
    for words in (
        "forward, no gradients",
        "training step",
        "1 × 32 tokens",
        "Counted on fake tensors",
        "roofline",
        "910B3",
        "ms, the host decides",
    ):
        assert words in output
    assert all(len(line) <= 80 for line in result.output.splitlines() if str(tmp_path) not in line)
    assert image.imread(plot).shape[:2] == (1080, 1920)


def test_a_model_that_brings_its_code_is_counted_once_that_is_trusted(tmp_path: Path) -> None:
    folder = own_code.save(tmp_path)
    for name in (folder, folder / "config.json"):
        assert "brings its own code: inspect runs that with --trust-remote-code" in refusal("inspect", name)
        found = report("inspect", name, "--tokens", 32, "--trust-remote-code")
        assert [row["kernel"] for row in found["modules"] if row["path"] == "layers.1.feed"] == ["FusedSwiGLUMLP"]
        before, behind = (variant["step"]["launches"] for variant in found["variants"])
        assert 0 < behind < before
    config = json.loads((folder / "config.json").read_text())
    others = {"AutoModelForTokenClassification": "own_code.Layer", "AutoModel": "own_code.Feed"}
    config["auto_map"] = others | config["auto_map"]  # in whatever order: what the checkpoint holds is built
    (folder / "config.json").write_text(json.dumps(config))
    assert subject.find(str(folder), trusts_code=True).model_class.__name__ == "KiteForCausalLM"
    (folder / "own_code.py").unlink()
    assert "is no valid configuration of a kite" in refusal("inspect", folder, "--trust-remote-code")


def test_a_model_has_several_names(folder: Path, monkeypatch, tmp_path: Path) -> None:
    """A folder, its config.json, and an id in the cache."""
    cached = tmp_path / "hub" / "models--somebody--tiny"
    shutil.copytree(folder, cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    names = str(folder), str(folder / "config.json"), "somebody/tiny"
    found = [subject.find(name) for name in names]
    assert tuple(each.name for each in found) == names
    configs = [each.config.to_dict() | {"_name_or_path": ""} for each in found]
    assert configs[0] == configs[1] == configs[2]


def test_each_kernel_alone_and_all_together(folder: Path) -> None:
    found = report("inspect", folder, "--tokens", 32, "--compare", "--chip", "910c")
    variants = {variant["name"]: variant for variant in found["variants"]}
    assert list(variants) == [ENDS[0], *(f"{name} alone" for name in REPOSITORIES), ENDS[1]]
    launches = {name: variant["step"]["launches"] for name, variant in variants.items()}
    saved = {name: launches["original"] - launches[f"{name} alone"] for name in REPOSITORIES}
    assert all(saved[name] > 0 for name in ("FlashAttention", "RMSNorm", "RoPE", "SwiGLU"))
    assert all(saved[name] == 0 for name in ("Activation", "FusedMoE", "Linear", "LinearAttention"))
    assert saved["CrossEntropy"] < 0  # it takes the loss in chunks, to hold less
    assert launches["with kernels"] == launches["original"] - sum(saved.values())
    products = {phase: min(variants[name][phase]["products_seconds"] for name in ENDS) for phase in inspecting.PHASES}
    for variant in variants.values():
        for phase, least in products.items():
            counts, operators = variant[phase], variant[phase]["operators"].values()
            for what in ("launches", "bytes", "flops"):
                assert counts[what] == sum(entry[what] for entry in operators)
            assert counts["estimate_of_products"] == counts["roofline_seconds"] / least > 1
            assert counts["estimate_seconds"] == max(counts["device_seconds"], counts["host_seconds"])
    before, after = (variants[name]["step"]["estimate_of_products"] for name in ENDS)
    assert after < before
    assert {row["kernel"] for row in found["modules"] if row["swapped"]} >= {"RMSNorm", "SwiGLUMLP", "RotaryPosEmb"}
    assert "neither is a measurement" in found["estimate"]["what"]
    assert found["estimate"]["chip"] == "one die of an Ascend 910C"


def test_solves_on_scalar_cores_are_marked(tmp_path: Path) -> None:
    """Of a layer of Qwen3.5 without kernels: two, and two more in its backward."""
    layers = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    AutoConfig.for_model("qwen3_5_text", **SIZES | layers).save_pretrained(tmp_path)
    found = inspecting.inspect(subject.find(str(tmp_path)), roofline.SOCS["910b3"], tokens=64)
    said = "On the AI CPU, a few scalar cores, for which the estimate is far too low: original: "
    forward_part, step_part = " ".join(printed(found).split()).split(said)[1:]
    # a cumulative sum of int64 and copies to where elements lie apart run there as well
    assert " 2 linalg_solve_triangular" in forward_part
    assert " 4 linalg_solve_triangular" in step_part
    before, after = printing.as_json(found)["variants"]
    assert before["step"]["ai_cpu_launches"]["linalg_solve_triangular"] == 4
    assert before["step"]["ai_cpu_launches"]["cumsum"] == 1
    assert not {"linalg_solve_triangular", "cumsum"} & set(after["step"]["ai_cpu_launches"])


@pytest.mark.long
def test_few_of_the_layers_of_a_235b_model_run(monkeypatch) -> None:
    ran, forward = [], Qwen3MoeDecoderLayer.forward
    monkeypatch.setattr(Qwen3MoeDecoderLayer, "forward", lambda *args, **kw: ran.append(1) or forward(*args, **kw))
    found = report("inspect", "Qwen3-235B-A22B")
    # without and with kernels, a forward and a step: once the first and the last layer, once the second one too
    assert len(ran) == 2 * 2 * (2 + 3)
    assert found["parameters"] == 235_093_634_560  # what the checkpoint on the Hub has
    assert sum(row["swapped"] for row in found["modules"]) == len(found["modules"])
    before, after = found["variants"][0]["step"], found["variants"][-1]["step"]
    assert after["host_waits"] <= 1 < before["host_waits"]
    assert after["launches"] < before["launches"] / 10


def test_modules_that_the_inputs_do_not_reach_are_named(tmp_path: Path) -> None:
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "depth": 3, "out_hidden_size": 64}
    text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision).save_pretrained(tmp_path)
    output = said("inspect", tmp_path, "--tokens", 32)
    assert "not counted, since these inputs do not reach it: model.visual" in output


def test_more_tokens_than_places_are_not_asked_for(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=3, n_head=2, n_positions=48, vocab_size=100)
    config.save_pretrained(tmp_path)
    output = said("inspect", tmp_path, "--tokens", 64)
    assert "48 tokens in place of 64: the model has no more places" in output
    assert "1 × 48 tokens" in output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no configuration"),
        ("[]", "names no model_type"),
        ('{"hidden_size": 8}', "names no model_type"),
        ('{"model_type": "qwen33"}', "describes a qwen33, which transformers"),
        ('{"model_type": "brand-new", "auto_map": {"AutoConfig": "code.Config"}}', "brings its own code"),
        ('{"model_type": "qwen3", "hidden_size": "many"}', "qwen3"),
        ('{"model_type": "qwen3", "num_attention_heads": 3, "hidden_size": 64, "head_dim": 0}', "Qwen3ForCausalLM"),
        ("\0\xff", "is no configuration"),
    ],
)
def test_a_config_that_is_none_is_refused_in_a_sentence(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert words in refusal("inspect", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen33"], "Near to it: qwen3"),
        (["./nowhere"], "neither a folder nor a file"),
        (["nobody/nothing"], "`hf download nobody/nothing config.json`"),
        (["."], "it has no config.json"),
        (["qwen3", "--dtype", "int8"], "bfloat16, float16, float32"),
        (["qwen3", "--chip", "910"], "910b2, 910b3, 910b4, 910c"),
        (["qwen3", "--plot", "plot.xyz"], "has to end in one of"),
        (["qwen3", "--plot", "/nowhere/plot.png"], "cannot be written: No such file or directory"),
        (["qwen3", "--tokens", "0"], "--tokens"),
        (["wav2vec2"], "takes input_values"),
        (["qwen3", "--cann", "newest"], "a version of CANN is written as 8.2 or 8.2.RC1"),
        (["bert", "--decode"], "does not go on with a text"),
        (["qwen3", "--decode", "--checkpointing"], "has no backward"),
        (["qwen3", "--decode", "--update"], "no update"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(arguments: list[str], words: str, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal("inspect", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_missing_matplotlib_is_explained(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'kernels-ext-npu[plot]'" in refusal("inspect", "qwen3", "--plot", "plot.png")


def test_a_step_with_adapters_and_what_follows_it(folder: Path) -> None:
    """Adapters are trained alone: their gradients are clipped, and their optimiser steps, in lists of launches."""
    count = partial(inspecting.inspect, subject.find(str(folder)), roofline.SOCS["910b3"], tokens=32, lora=4)
    inspected = count(update=True)
    found = printing.as_json(inspected)
    assert found["inputs"] == "1 × 32 tokens, with adapters of rank 4"
    kernels = {row["path"].rpartition(".")[2]: row["kernel"] for row in found["projections"]}
    assert kernels.pop("lm_head", None) is None
    assert set(kernels.values()) == {"lora_linear"}
    before, after = found["variants"]
    assert after["step"]["launches"] < 0.7 * before["step"]["launches"]
    for phase in ("clipping", "optimizer"):
        assert before[phase]["launches"] == after[phase]["launches"] > 0
        assert before[phase]["host_waits"] == 0
        assert all(
            name.startswith("_foreach") for name, count in before[phase]["operators"].items() if count["launches"] > 5
        )
    for variant in (before, after):
        parts = variant["training_forward"], variant["backward"]
        for what in ("launches", "bytes", "host_waits"):
            assert sum(part[what] for part in parts) == variant["step"][what]
            assert variant["whole_step"][what] == sum(variant[p][what] for p in ("step", "clipping", "optimizer"))
        peaks = [part["peak_activation_bytes"] for part in parts]
        assert 0 < max(peaks) == variant["step"]["peak_activation_bytes"]
        assert variant["whole_step"]["peak_activation_bytes"] == max(
            *peaks, variant["optimizer"]["peak_activation_bytes"]
        )
    table = printed(inspected).partition("a whole step")[2]
    for phase, title in inspecting.WHOLE.items():
        one, other = (variant[phase]["launches"] for variant in (before, after))
        assert f"{title} {one:,} " in table
        assert one == other or f"→ {other:,} " in table
    again = printing.as_json(count(checkpointing=True))["variants"][-1]
    assert again["step"]["launches"] > after["step"]["launches"]  # layers are computed again
    assert not {"optimizer", "backward", "whole_step"} & again.keys()


def test_decoding_is_shown_with_both_caches_and_its_replays(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", **SIZES | {"num_hidden_layers": 4}).save_pretrained(tmp_path)
    found = report("inspect", tmp_path, "--decode", "--tokens", 32, "--batch", 3)
    assert found["inputs"] == "3 × 32 tokens, and one more a row"
    before, after = found["variants"]
    for phase in phases.DECODING:
        assert after[phase]["launches"] < before[phase]["launches"]
        assert after[phase]["host_waits"] == 0
        assert after[phase]["graph_replays"] == (phase == phases.STATIC)
    held = 4 * 2 * 3 * 33 * 2 * 16 * 2  # layers, keys and values, rows, tokens, two heads in bfloat16
    assert after[phases.GROWING]["bytes"] > held
    assert after[phases.STATIC]["peak_activation_bytes"] < held  # the cache is none of the step's
