"""What `kernels-ext-npu benchmark` compares: models by name or by config, and LLaMA-Factory's kernels."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from kernels_ext_npu import model_configs
from kernels_ext_npu.benchmarking import providers, shrunk_models
from kernels_ext_npu.model_configs import PUBLISHED
from tests.integration.benchmarking.benchmark_runs import EXPERTS, SMALL, TOKENS, rows, run, write_config


@pytest.mark.parametrize(("name", "billions"), [  # as the model cards give them; of Gemma 3 without its vision tower
    ("Qwen3-8B", 8.19),
    ("Llama-3.1-8B", 8.03),
    ("Gemma-3-12B", 11.8),
    ("Qwen3-30B-A3B", 30.5),
    ("Qwen3-235B-A22B", 235.1),
    ("gpt-oss-20b", 20.9),
])  # fmt: skip
def test_models_have_as_many_parameters_as_was_published(name: str, billions: float) -> None:
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(model_configs.config(name))
    model.tie_weights()
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=5e-3)


def test_attention_is_compared_by_what_it_gives_its_layer(tmp_path: Path) -> None:
    """Eager attention, all that gpt-oss has in transformers, gives the scores besides, which no operator does."""
    options = ["--dtype", "bf16", "--tokens", 64, "--kernel", "FlashAttention", "--json", "--shrink", 1]
    sizes = {"hidden_size": 384, "num_attention_heads": 8, "num_local_experts": 4}  # those of an eighth of 20b
    result = run("--model", write_config(tmp_path, "gpt_oss", **sizes), *options)
    assert result.exit_code == 0, result.output
    original, ours = (rows(json.loads(result.stdout), provider=name) for name in ("transformers", "kernels-ext-npu"))
    assert len(original) == len(ours) == 5  # prefill, decoding, and three directions of training
    assert all(other["launches"] < one["launches"] for one, other in zip(original, ours))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma3_text", "bamba", "llama4_text", "glm4_moe", "mistral"])
def test_a_config_of_any_model_keeps_a_layer_of_each_kind(tmp_path: Path, model_type) -> None:
    path = write_config(tmp_path, model_type, num_hidden_layers=12)

    def classes(loaded) -> set[str]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(loaded)
        return {type(module).__name__ for module in model.modules()}

    reduced = shrunk_models.load(str(path), 2).config
    assert classes(reduced) == classes(AutoConfig.from_pretrained(path))
    assert reduced.num_hidden_layers < 12


def test_calls_of_one_module_with_other_shapes_are_told_apart(tmp_path: Path) -> None:
    """The norm of Llama 4's queries is that of its keys."""
    path = write_config(tmp_path, "llama4_text", num_local_experts=4)
    result = run("--model", path, *SMALL, "--kernel", "RMSNorm", "--json")
    assert result.exit_code == 0, result.output
    norms = rows(json.loads(result.stdout), name="Llama4TextL2Norm", phase="prefill", provider="kernels-ext-npu")
    assert sorted(row["shapes"] for row in norms) == [[[1, TOKENS, 1, 64]], [[1, TOKENS, 2, 64]]]


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_ours_agrees_in_every_model_of_the_table(name) -> None:
    result = run("--model", name)
    assert result.exit_code == 0, result.output
    assert "disagrees" not in result.stdout


# --- LLaMA-Factory


def test_a_release_of_llama_factory_without_kernels_is_named(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "llamafactory").mkdir()
    (tmp_path / "llamafactory" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llamafactory", raising=False)
    found, said = providers.providers()
    assert list(found) == ["transformers", "kernels-ext-npu"]
    assert "whose NPU kernels cannot be imported: No module named 'llamafactory.v1'" in said


@pytest.mark.long
def test_llama_factory_is_compared_where_it_is_installed(run_python, tmp_path: Path) -> None:
    """The released wheel; it is skipped where no package index has it."""
    import subprocess

    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, "llamafactory==0.9.5"]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"llamafactory cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    options = [*map(str, SMALL), "--json"]
    small: dict[str, dict] = {"qwen3": {}, "qwen3_moe": EXPERTS, "gemma3_text": {}}
    for name, sizes in small.items():
        options += ["--model", str(write_config(tmp_path / name, name, **sizes))]
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from kernels_ext_npu.cli import app; app()"
    report = json.loads(run_python(code, "benchmark", *options).stdout)
    assert report["versions"]["LLaMA-Factory"] == "0.9.5"

    def launches(name: str) -> list[int]:
        found = [row for row in rows(report, name=name, phase="training") if row["direction"] == "both"]
        return [row["launches"] for row in found]

    for layer in ("Qwen3DecoderLayer", "Qwen3MoeDecoderLayer"):
        original, ours, theirs = launches(layer)
        assert ours < theirs < original
    # what that release does to Gemma: SiLU in place of GELU, and weights in place of 1 + weight
    for name in ("Gemma3RMSNorm", "Gemma3MLP", "Gemma3DecoderLayer"):
        refused = rows(report, name=name, phase="training", provider="LLaMA-Factory")
        assert refused
        assert all(row["refused"].startswith("disagrees") for row in refused)
    routers = rows(report, name="Qwen3MoeTopKRouter", provider="LLaMA-Factory")
    assert {row["refused"] for row in routers} == {"it has no kernel for it"}
