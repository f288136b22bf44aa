"""``kernels-ext-npu coverage`` as it is called: tables, JSON, and what it says of a model type that is none."""

import importlib.util
import io
import json
import re
import sys

import pytest
import transformers
from typer.testing import CliRunner

from kernels_ext_npu import cli
from kernels_ext_npu.catalogue import SERVING


def run(*arguments: str, columns: int = 80, **environment: str):
    return CliRunner().invoke(cli.app, ["coverage", *arguments], env={"COLUMNS": str(columns)} | environment)


def cells(line: str) -> list[str]:
    return re.findall(r"(?<!\S)(\d+/\d+|–)(?!\S)", line)


@pytest.mark.long
def test_the_table_has_every_model_type_and_fits_a_terminal() -> None:
    output = run().stdout
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    words = set(re.findall(r"[\w.-]+(?<!\.)", output))
    assert set(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES) <= words
    (moe,) = [line for line in lines if line.split()[:1] == ["deepseek_v3"]]
    assert cells(moe) == ["1/1", "1/1", "3/3", "2/2", "1/1", "–"]
    (llava,) = [number for number, line in enumerate(lines) if line.split()[:1] == ["llava"]]
    assert lines[llava + 1].split() == ["with", "clip_vision_model,", "llama"]
    missing = importlib.util.find_spec("torchaudio") is None
    assert ("needs torchaudio, which is not installed" in " ".join(output.split())) == missing
    reason = "no operator: the gate is the second half, and the operator takes SiLU of the first"
    classes = "MoonshineDecoderMLP, MoonshineStreamingDecoderMLP, Phi4MultimodalAudioMLP"
    assert f"3 {reason}: {classes}" in " ".join(output.split())


def test_a_terminal_shows_progress_which_is_gone_in_the_end(monkeypatch, capsys) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    cli.app(["coverage", "qwen3"], standalone_mode=False)
    assert "reading transformers" not in capsys.readouterr().out
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[2K") > shown.rindex("reading transformers")  # the line was erased


@pytest.fixture(scope="module")
def report() -> dict:
    result = run("--json", FORCE_COLOR="1")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""  # no progress where there is no terminal
    return json.loads(result.stdout)


def test_json_has_the_sums_and_every_model_type(report: dict) -> None:
    assert report["transformers"] == transformers.__version__
    folders = {entry["folder"]: entry for entry in report["model_types"].values()}
    for kernel in (repository.name for repository in SERVING):
        for side in ("served", "kept"):
            shared = [e for e in report["shared"] if e["kernel"] == kernel and (e["layer"] is None) == (side == "kept")]
            own = sum(entry["kernels"][kernel][side] for entry in folders.values())
            assert report["kernels"][kernel][side] == own + len(shared)
    assert {entry["name"] for entry in report["shared"] if entry["layer"] == "NewGELU"} == {
        "AccurateGELUActivation",
        "NewGELUActivation",
    }
    text, vision = (report["model_types"][name] for name in ("qwen3_vl_text", "qwen3_vl_vision"))
    assert text == vision
    assert text["kernels"]["RoPE"] == {"served": 4, "kept": 0}
    assert report["model_types"]["falcon_h1"]["kernels"]["RMSNorm"] == {"served": 1, "kept": 1}


def test_model_types_in_detail() -> None:
    """Reasons are beside them, and two types of one folder are shown once."""
    result = run("qwen3_moe", "gemma3", "falcon_h1", "qwen3_vl", "qwen3_vl_text", columns=160)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["norms", "Qwen3MoeRMSNorm", "RMSNorm"] in lines
    assert ["experts", "Qwen3MoeExperts", "MoEExperts"] in lines
    assert ["routers", "Qwen3MoeTopKRouter", "SoftmaxTopKRouter"] in lines
    assert ["rotary", "functions", "apply_rotary_pos_emb", "RotaryPosEmb"] in lines
    assert "siglip_vision_model" in result.stdout
    assert "Qwen3RMSNorm" not in result.stdout
    assert "not served: no operator: norms groups of the last dimension, with a weight for each" in result.stdout
    assert result.stdout.count("Qwen3VLTextMLP") == result.stdout.count("models/qwen3_vl") == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("llava", "It has parts of other model types, unless a config names others: clip_vision_model, llama."),
        ("layoutxlm", "It has no modeling file."),
        ("gpt-sw3", "gpt-sw3, gpt2: models/gpt2"),
        ("resnet", "It defines nothing that is counted."),
    ],
)
def test_model_types_without_anything_say_so(name: str, sentence: str) -> None:
    assert sentence in run(name, columns=120).stdout


@pytest.mark.parametrize(
    ("name", "near"),
    [("qwen3-mo", "qwen3_moe"), ("Gemma3", "gemma3"), ("deepseekv3", "deepseek_v3"), ("@", "coverage` lists")],
)
def test_an_unknown_model_type_gets_near_misses(name: str, near: str) -> None:
    result = run("qwen3", name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"has no model type {name}, which is the model_type of a config.json" in result.stderr
    assert near in result.stderr


def test_no_torch_npu_is_needed(run_forked) -> None:
    code = "import sys, torch; del torch.npu; sys.modules['torch_npu'] = None\n"  # as if it were not installed
    code += "from kernels_ext_npu.cli import app; app(['coverage', 'qwen3'])"
    assert "Qwen3RMSNorm" in run_forked(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
