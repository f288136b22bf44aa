"""`kernels-ext-npu benchmark`: what it compares, counts and refuses, with small configs in place of the models' own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from kernels_ext_npu import registration, sources
from kernels_ext_npu.benchmarking import models, providers
from kernels_ext_npu.cli import app
from kernels_ext_npu.published_models import MODELS

HIDDEN, TOKENS = 128, 16
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 32,
    "num_hidden_layers": 3,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory):
    """The path of a small config.json of a model type."""

    def write(model_type: str, **sizes) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        AutoConfig.for_model(model_type, **SIZES | sizes).save_pretrained(folder)
        return folder / "config.json"

    return write


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["benchmark", *map(str, arguments)])


@pytest.fixture(scope="module")
def mixture(config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run of everything there is in a small mixture of experts."""
    picture = tmp_path_factory.mktemp("plot") / "benchmark.png"
    path = config("qwen3_moe", **EXPERTS)
    return run(
        "--model", path, "--dtype", "bf16", "--tokens", TOKENS, "--shrink", 1, "--json", "--plot", picture
    ), picture


@pytest.fixture(scope="module")
def report(mixture) -> dict:
    return json.loads(mixture[0].stdout)


def rows(report: dict, **wanted: str) -> list[dict]:
    return [row for row in report["results"] if all(row[key].startswith(value) for key, value in wanted.items())]


def test_everything_is_measured_and_ours_agrees(mixture, report) -> None:
    result, _ = mixture
    assert result.exit_code == 0, result.stderr
    assert {row["kernel"] for row in report["results"]} == {"RMSNorm", "RoPE", "FusedMoE", "layer"}
    assert {row["name"] for row in rows(report, kernel="FusedMoE")} == {"Qwen3MoeExperts", "Qwen3MoeTopKRouter"}
    for provider in ("transformers", "kernels-ext-npu"):
        assert not [row for row in rows(report, provider=provider) if "refused" in row]
        for phase, directions in (("prefill", {"forward"}), ("training", {"forward", "backward", "both"})):
            layers = rows(report, provider=provider, phase=phase, kernel="layer")
            assert {row["direction"] for row in layers} == directions
    for one, other in zip(rows(report, provider="transformers"), rows(report, provider="kernels-ext-npu")):
        assert (one["path"], one["phase"], one["direction"]) == (other["path"], other["phase"], other["direction"])
        assert other["launches"] <= one["launches"]
        assert other["bytes"] < one["bytes"]
        assert other["host_waits"] == 0


def test_counts_are_those_of_the_operator(report) -> None:
    """One launch of npu_rms_norm: it reads hidden states and weight, and writes as much and rstd in float32."""
    norms = rows(report, kernel="RMSNorm", phase="prefill", provider="kernels-ext-npu")
    (row,) = [row for row in norms if row["shapes"] == [[1, TOKENS, HIDDEN]]]
    hidden_states, weight, rstd = 2 * TOKENS * HIDDEN, 2 * HIDDEN, 4 * TOKENS
    assert (row["launches"], row["bytes"]) == (1, 2 * hidden_states + weight + rstd)
    # blocks are asked for with 32 bytes more, which the device's copies may touch
    assert hidden_states + rstd <= row["peak_memory_bytes"] <= hidden_states + rstd + 2 * 512


def test_there_are_no_times_on_the_software_device(mixture, report) -> None:
    def keys(value) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    assert not [key for key in keys(report) if any(part in key for part in ("ms", "time", "quartile", "second"))]
    assert "measures no times" in report["note"]
    shown = mixture[0].stderr
    assert "measures no times" in shown
    assert "median" not in shown
    assert "0.13" in shown or "launches" in shown


def test_it_says_where_figures_come_from(report) -> None:
    assert report["device"].startswith("software device")
    assert {"torch", "torch_npu", "transformers", "kernels", "CANN", "LLaMA-Factory"} <= report["versions"].keys()
    (model,) = report["models"].values()
    assert model["sizes"]["hidden_size"] == HIDDEN
    assert model["source"].endswith("config.json")
    assert "2 and 4 times what the original differs" in report["tolerance"]


def test_what_is_not_there_is_named(mixture, report) -> None:
    if providers.importlib.util.find_spec("llamafactory") is None:
        assert report["versions"]["LLaMA-Factory"] == "not installed"
        assert "LLaMA-Factory not installed" in mixture[0].stderr


def test_the_picture_is_drawn(mixture) -> None:
    from matplotlib.image import imread

    height, width, _ = imread(mixture[1]).shape
    assert width / height == pytest.approx(16 / 9)
    assert imread(mixture[1])[..., :3].std() > 0.05  # not blank


def test_nothing_of_it_stays(mixture) -> None:
    from kernels import kernelize  # noqa: F401  the function of transformers is an object that kernels made
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    assert registration.current is None
    assert "forward" not in vars(modeling_qwen3_moe.apply_rotary_pos_emb)


def test_the_table_is_for_people(config) -> None:
    options = ["--dtype", "float16", "--tokens", TOKENS, "--shrink", 1, "--kernel", "swiglu"]
    result = run("--model", config("llama"), *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any("fp16: transformers / kernels-ext-npu" in line for line in lines)
    mlp = [line for line in lines if "LlamaMLP" in line]
    assert [line.split()[2] for line in mlp] == ["forward", "forward", "forward", "backward", "both"]
    assert mlp[0].split()[3:6] == [
        "5",
        "/",
        "3",
    ]  # two products, silu, mul, a product; a product, npu_swiglu, a product


# --- a wrong kernel


def change(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    """Give the layer of norms another function, which gets the right one."""
    layer = sources.layer_source("bundled", "RMSNorm", "RMSNorm").load()
    names = layer.forward.__globals__
    right = names["rms_norm"]
    monkeypatch.setitem(names, "rms_norm", lambda *arguments: wrong(right(*arguments)))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.03


def lose_a_row(y: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(y.shape[:-1], dtype=y.dtype, device=y.device)
    keep.view(-1)[-1] = 0
    return y * keep.unsqueeze(-1)


def fail(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("error 561002")


@pytest.mark.parametrize(
    ("wrong", "said", "phases"),
    [
        (lambda y: y * 1.03, "output 0 is 3.0e-02 away from float32", {"prefill", "decode", "training"}),
        (lose_a_row, "output 0 is", {"prefill", "decode", "training"}),
        (lambda y: y * float("nan"), "output 0 is nan", {"prefill", "decode", "training"}),
        (lambda y: y[..., :-1], "shape", {"prefill", "decode", "training"}),
        (WrongGradient.apply, "gradient of input 0 is 3.", {"training"}),
        (fail, "raised RuntimeError: error 561002", {"prefill", "decode", "training"}),
    ],
)
def test_a_wrong_kernel_has_no_figures(monkeypatch, config, wrong, said, phases) -> None:
    change(monkeypatch, wrong)
    options = ["--dtype", "bf16", "--tokens", TOKENS, "--shrink", 1, "--kernel", "RMSNorm", "--json"]
    result = run("--model", config("llama"), *options)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    refused = [row for row in report["results"] if "refused" in row]
    assert {row["phase"].partition(",")[0] for row in refused} == phases
    for row in refused:
        assert row["provider"] == "kernels-ext-npu"
        assert said in row["refused"]
        assert not {"launches", "bytes", "peak_memory_bytes", "distance"} & row.keys()
    assert all("launches" in row for row in rows(report, provider="transformers"))
    assert said in result.stderr


# --- the models


@pytest.mark.parametrize(
    ("name", "layers", "vocabulary", "tied", "billions"),
    [  # parameters as the model cards give them; of Gemma 3 without its vision tower of 0.4
        ("Qwen3-8B", 36, 151936, False, 8.19),
        ("Llama-3.1-8B", 32, 128256, False, 8.03),
        ("Gemma-3-12B", 48, 262208, True, 11.8),
        ("Qwen3-30B-A3B", 48, 151936, False, 30.5),
        ("gpt-oss-20b", 24, 201088, False, 20.9),
    ],
)
def test_layers_have_as_many_parameters_as_was_published(name, layers, vocabulary, tied, billions) -> None:
    loaded = models.load(name, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded.config)
    in_layers = sum(p.numel() for p in model.base_model.layers.parameters()) / loaded.config.num_hidden_layers
    embeddings = vocabulary * loaded.config.hidden_size * (1 if tied else 2)
    assert (layers * in_layers + embeddings) / 1e9 == pytest.approx(billions, rel=5e-3)


def test_the_table_has_every_kind_of_kernel() -> None:
    from kernels_ext_npu import reporting

    layers = set()
    for name in MODELS:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(models.load(name, 8).config)
        layers |= {row.kernel for row in reporting.report(model)}
    wanted = {
        "RMSNorm",
        "RMSNormZeroCentered",
        "RMSNormGated",
        "RMSNormCastLast",
        "SwiGLUMLP",
        "GeGLUMLP",
        "MoEExperts",
    }
    assert wanted | {"SoftmaxTopKRouter", "RotaryPosEmb", "RotaryPosEmbPartial", "RotaryPosEmbHalfWidth"} <= layers


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma3_text", "bamba", "llama4_text", "glm4_moe", "mistral"])
def test_a_config_of_any_model_keeps_a_layer_of_each_kind(config, model_type) -> None:
    path = config(model_type, num_hidden_layers=12)

    def classes(loaded) -> set[str]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(loaded)
        return {type(module).__name__ for module in model.modules()}

    reduced = models.load(str(path), 2).config
    assert classes(reduced) == classes(AutoConfig.from_pretrained(path))
    assert reduced.num_hidden_layers < 12


def test_calls_of_one_module_with_other_shapes_are_told_apart(config) -> None:
    """The norm of Llama 4's queries is that of its keys."""
    options = ["--dtype", "bf16", "--tokens", TOKENS, "--kernel", "RMSNorm", "--json", "--shrink", 1]
    result = run("--model", config("llama4_text", num_local_experts=4), *options)
    assert result.exit_code == 0, result.output
    norms = rows(json.loads(result.stdout), name="Llama4TextL2Norm", phase="prefill", provider="kernels-ext-npu")
    assert sorted(row["shapes"] for row in norms) == [[[1, TOKENS, 1, 64]], [[1, TOKENS, 2, 64]]]


def test_no_choice_of_experts_is_a_matter_of_rounding(config) -> None:
    """Every token chooses the same experts in bfloat16 as in float32: otherwise layers could not be compared."""
    model = models.load(str(config("qwen3_moe", **EXPERTS | {"num_experts": 64})), 1)
    built = model.build(torch.bfloat16).eval()
    inputs = model.hidden_states(16, 128, torch.bfloat16)
    chosen = []
    for dtype in (torch.bfloat16, torch.float32):
        gate = built.to(dtype).model.layers[0].mlp.gate
        hook = gate.register_forward_hook(lambda module, args, result: chosen.append(result[2].sort().values))
        with torch.no_grad():
            built.base_model(inputs_embeds=inputs.to(dtype))
        hook.remove()
    assert torch.equal(*chosen)
    assert len(chosen[0].unique()) == 64


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
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
    assert [provider.name for provider in found] == ["transformers", "kernels-ext-npu"]
    assert "whose NPU kernels cannot be imported: No module named 'llamafactory.v1'" in said


@pytest.mark.long
def test_llama_factory_is_compared_where_it_is_installed(run_python, tmp_path: Path, config) -> None:
    """The released wheel; it is skipped where no package index has it."""
    import subprocess

    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, "llamafactory==0.9.5"]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"llamafactory cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    options = ["--dtype", "bf16", "--tokens", str(TOKENS), "--shrink", "1", "--json"]
    paths = [config("qwen3"), config("qwen3_moe", **EXPERTS), config("gemma3_text")]
    for path in paths:
        options += ["--model", str(path)]
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


# --- what cannot be measured


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "Qwen3-8"], "--model Qwen3-8: did you mean Qwen3-8B? there are Qwen3-8B, Llama-3.1-8B"),
        (["--model", "/nowhere/config.json"], "is neither a folder nor a file"),
        (["--kernel", "RMSnrom"], "--kernel RMSnrom: did you mean RMSNorm? there are RMSNorm, SwiGLU"),
        (["--dtype", "float32"], "--dtype float32: there are bf16, fp16"),
        (["--plot", "/nowhere/plot.png"], "--plot /nowhere/plot.png cannot be written: No such file or directory"),
        (["--plot", "plot.xyz"], "--plot plot.xyz: the name has to end in one of"),
        (["--tokens", "1"], "16"),
    ],
)
def test_what_was_asked_for_wrongly_is_explained(arguments, said) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "config.json"),
        ('{"model_type": "qwen99"}', "qwen99"),
        ('{"model_type": "vit"}', "no model for text can be built of its config"),
    ],
)
def test_a_config_that_cannot_be_used_is_explained(tmp_path: Path, content, said) -> None:
    (tmp_path / "config.json").write_text(content)
    result = run("--model", tmp_path, "--dtype", "bf16")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") <= 12
    assert "Traceback" not in result.output


def test_a_kernel_that_a_model_has_no_use_for_is_named(config) -> None:
    result = run("--model", config("llama"), "--kernel", "FusedMoE", "--dtype", "bf16", "--tokens", TOKENS)
    assert result.exit_code == 2
    assert "none of the models has a call of FusedMoE" in result.stderr


def test_sizes_that_do_not_fit_each_other_are_explained(config) -> None:
    path = config("falcon_h1")  # mamba_d_ssm is the product of what is divided and of what is not
    result = run("--model", path, "--kernel", "layer", "--dtype", "bf16", "--tokens", TOKENS, "--shrink", 2)
    assert result.exit_code == 2
    assert "kernels-ext-npu: raised RuntimeError" in result.stderr
    assert "try another one, or 1" in result.stderr


def test_a_missing_matplotlib_is_explained(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--plot", "plot.png")
    assert result.exit_code == 2
    assert "pip install 'kernels-ext-npu[plot]'" in result.stderr


def test_a_file_that_is_there_is_kept_until_there_is_a_new_one(monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    path.write_text("old")
    assert run("--plot", path, "--kernel", "nothing").exit_code == 2
    monkeypatch.setattr("torch_npu.npu.is_available", lambda: False)
    assert run("--plot", path).exit_code == run("--plot", tmp_path / "new.png").exit_code == 2
    assert path.read_text() == "old"
    assert not (tmp_path / "new.png").exists()


def test_a_missing_device_and_a_missing_dtype_are_explained(monkeypatch) -> None:
    monkeypatch.setattr("torch_npu.npu.is_bf16_supported", lambda: False)
    result = run("--dtype", "bf16")
    assert result.exit_code == 2
    assert "has no bfloat16; use --dtype fp16" in result.stderr
    monkeypatch.setattr("torch_npu.npu.is_available", lambda: False)
    result = run()
    assert result.exit_code == 2
    assert "torch_npu finds no device that it may use: look at `npu-smi info`" in result.stderr


def test_a_missing_torch_npu_is_explained(run_python) -> None:
    code = "import sys; sys.modules['torch_npu'] = None; from kernels_ext_npu.cli import app; app()"
    result = run_python(code, "benchmark", check=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 2
    assert "torch_npu" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_needs_no_torch(run_python) -> None:
    code = """
import sys
from kernels_ext_npu.cli import app
try:
    app()
finally:
    assert not {"torch", "transformers", "matplotlib"} & sys.modules.keys()
"""
    assert "--tokens" in run_python(code, "benchmark", "--help").stdout
