"""``kernels-ext-npu demo``: what it shows, and that it cannot be fooled."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from build import ROOT, build
from transformers import AutoModelForCausalLM

import kernels_ext_npu
from kernels_ext_npu import model_configs
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.demo import model_comparison
from kernels_ext_npu.distribution import sources
from tests.integration.whole_models import own_code
from tests.support.commands import refusal, run


def tables(output: str) -> list[dict[str, list[str]]]:
    """The last three: what is swapped, called, and how it agrees; the values of each model."""
    found: list[dict[str, list[str]]] = []
    for part in re.split(r"─+\s*\n", output)[-3:]:
        lines = [re.split(r" {2,}", line.strip()) for line in part.splitlines()]
        found.append({name: values for name, *values in lines if values})
    return found


@pytest.mark.software
def test_ten_models_agree_and_every_norm_is_one_launch() -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "software device, as Ascend910" in result.output
    swapped, calls, agreement = tables(result.output)
    assert swapped["Qwen2.5-VL"] == ["10 of 10", "4 of 4", "0 of 0", "0 of 0", "4 of 4", "2 of 2", "4 of 4", "1 of 1"]
    # every experts module; the softmax of what was chosen is no kernel's
    experts = {"gpt-oss": ["2 of 2", "0 of 2"], "Qwen3-MoE": ["2 of 2"] * 2, "DeepSeek-V3": ["1 of 1"] * 2}
    for name in model_configs.TINY:
        norm, mlp, *moe, function, embeddings, attention, head = swapped[name]
        others = norm, mlp, function, embeddings, attention, head
        assert moe == experts.get(name, ["0 of 0"] * 2)
        assert all(len(set(value.split(" of "))) == 1 for value in others)
        norms, mlps, rotary, *_ = (int(value.split(" ")[0]) for value in others)
        rms_norm, rotary_mul, units, products, _, operators, before, waits, waits_in_training = map(int, calls[name])
        assert rms_norm == norms
        assert rotary_mul == 2 * (2 if name == "DeepSeek-V3" else rotary)  # its layers hold two functions, and call one
        layers = int(moe[0].split(" ")[0])
        assert units == mlps + layers
        assert products == 2 * layers
        assert (waits == waits_in_training == 0) == (name != "Qwen2.5-VL")  # its images' sizes are read on the host
        assert operators < before
        *differences, tokens, in_graphs, agrees = agreement[name]
        assert all(float(difference) <= 1e-5 for difference in differences)
        assert (tokens, agrees) == ("equal", "yes")
        assert in_graphs == ("equal, 6 replays" if name in model_comparison.IN_GRAPHS else "not run")
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_a_checkpoint_of_ones_own_is_shown(checkpoint) -> None:
    result = run("demo", "--model", checkpoint("gemma2"))
    assert result.exit_code == 0, result.output
    assert [values[-1] for values in tables(result.output)[-1].values()] == ["yes"]


def test_a_checkpoint_that_brings_its_code_is_shown_once_that_is_trusted(tmp_path: Path) -> None:
    folder = own_code.save(tmp_path)
    assert "brings its own code: with --trust-remote-code that is run" in refusal("demo", "--model", folder)
    result = run("demo", "--model", folder, "--trust-remote-code")
    assert result.exit_code == 0, result.output
    assert "5 of 5 norms, 2 of 2 gated MLPs, 2 of 2 rotary calls" in " ".join(result.output.split())
    assert [values[-1] for values in tables(result.output)[-1].values()] == ["yes"]


@pytest.mark.software
def test_a_kernel_that_computes_something_else_ends_with_1(monkeypatch, checkpoint, tmp_path: Path) -> None:
    """The same repository with a norm that forgets its epsilon and a part in a thousand of its result."""
    shutil.copytree(ROOT / "RMSNorm", tmp_path / "RMSNorm", ignore=shutil.ignore_patterns("build"))
    for repository in set(REPOSITORIES) - {"RMSNorm"}:
        shutil.copytree(ROOT / repository, tmp_path / repository)
    source = tmp_path / "RMSNorm" / "torch-ext" / "rmsnorm" / "functional.py"
    text = source.read_text()
    assert text.count("npu_rms_norm(hidden_states, weight, eps)[0]") == 1
    source.write_text(text.replace("(hidden_states, weight, eps)[0]", "(hidden_states, weight, 0.0)[0] * 0.999"))
    shutil.copy(ROOT / "variants.toml", tmp_path)
    build(tmp_path / "RMSNorm", tmp_path)
    monkeypatch.setattr(sources, "root", lambda source: tmp_path)
    result = run("demo", "--model", checkpoint("gemma2"))
    assert result.exit_code == 1
    assert [values[-1] for values in tables(result.output)[-1].values()] == ["no"]


AGREEING = model_comparison.Result(
    report=kernels_ext_npu.Report([kernels_ext_npu.Row("norm", "RMSNorm", "RMSNorm", True, None)]),
    logits=0.0,
    same_tokens=True,
    gradient=0.0,
    loss=0.0,
    waits=(0, 0),
    norm_calls=1,
    calls={"npu_rms_norm": 1},
    operators_before=7,
)


@pytest.mark.parametrize("change", [
    {"logits": math.nan},
    {"gradient": math.nan},
    {"loss": 1.0},
    {"same_tokens": False},
    pytest.param({"norm_calls": 2}, marks=pytest.mark.software),
    {"same_in_graphs": False, "replays": 6},
])  # fmt: skip
def test_what_is_not_shown_to_agree_disagrees(change) -> None:
    assert AGREEING.agrees()
    assert not replace(AGREEING, **change).agrees()


def test_what_is_no_checkpoint_of_a_model_for_text_is_named(checkpoint, tmp_path: Path) -> None:
    said = refusal("demo", "--model", tmp_path / "nowhere")
    assert "is no checkpoint: a folder with config.json and weights is expected" in said
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    assert f"{tmp_path} could not be loaded" in refusal("demo", "--model", tmp_path)
    transformers.ViTConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert "holds a vit: the demo runs models that generate text" in refusal("demo", "--model", tmp_path)


def test_norms_of_the_saved_models_are_not_all_ones(tmp_path: Path) -> None:
    model_comparison.save("Llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.allclose(model.model.norm.weight, torch.ones(()), atol=0.1)
