"""`kernels-ext-npu benchmark --report`: refused without a card, and what it writes on a device that says it is one."""

import getpass
import itertools
import json
import platform
import re
from pathlib import Path

import pytest
import torch
from build import ROOT
from estimating import reports, rows
from transformers import AutoModelForCausalLM

import softnpu
from kernels_ext_npu.benchmarking import call_costs, operator_pairs, recorded_calls, results_layout, shrunk_models
from kernels_ext_npu.benchmarking.measured_calls import Result
from kernels_ext_npu.model_configs import PUBLISHED
from tests.integration.benchmarking.benchmark_runs import SMALL, refusal, run, write_config

DIRECTIONS = {"prefill": ["forward"], "decode": ["forward"], "training": ["forward", "backward", "both"]}
SPREAD = {"lower_quartile_ms": 1.5, "median_ms": 2.0, "upper_quartile_ms": 3.0, "repeats": 3}


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The software device says that it is real: of three runs its events tell 4, 1 and 2 ms, one after the other."""
    monkeypatch.setattr(softnpu, "is_software", lambda: False)
    told = itertools.cycle((4.0, 1.0, 2.0))
    monkeypatch.setattr(torch.npu.Event, "elapsed_time", lambda start, end: next(told))
    monkeypatch.setattr(call_costs, "WARM_UP", 1)


def section_lines(kernels: set[str]) -> set[str]:
    """What a report has of a model for which these kernels have calls."""
    return {
        f"{kernel}, {phase}, {direction}"
        for kernel in kernels
        for phase, directions in DIRECTIONS.items()
        for direction in directions
        if phase == "training" or kernel != recorded_calls.HEAD
    }


@pytest.mark.software
def test_the_software_device_writes_no_report(tmp_path: Path) -> None:
    said = refusal("--model", write_config(tmp_path, "llama"), "--report", tmp_path / "report.json")
    assert "--report: The software device computes on the host" in said
    assert "on a machine with a card" in said
    assert not (tmp_path / "report.json").exists()


def test_every_line_has_times_and_their_spread(on_a_card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = tmp_path / "report.json", write_config(tmp_path, "llama")
    kernels = {"SwiGLU", "CrossEntropy", "step"}
    options = [*SMALL, "--repeats", 3, "--report", path]
    result = run("--model", config, *options, *(part for kernel in kernels for part in ("--kernel", kernel)))
    assert result.exit_code == 0, result.output
    assert "it can be attached to an issue as it is" in result.stdout
    text = path.read_text("utf-8")
    written = json.loads(text)
    assert {line["what"] for line in written["results"]} == section_lines(kernels)
    for line in written["results"]:
        for provider in ("transformers", "kernels-ext-npu"):
            figures = line[provider]
            assert {name: figures[name] for name in SPREAD} == SPREAD
            assert figures["launches"] > 0
            assert figures["bytes"] > 0
            work = figures["work"]  # what an estimate of time is made of
            assert work["kernel"] + work.get("attention_kernel", 0) == figures["kernels"]
            assert work.get("launch", 0) + work.get("launch_backward", 0) == figures["launches"]
    file = tmp_path / "measured.json"
    file.write_text(rows.FILE.read_text("utf-8"))
    monkeypatch.setattr(rows, "FILE", file)
    assert len(reports.add(rows.read(), path)) == 2 * len(written["results"])
    machine = written["machine"]
    assert {"chip", "driver", "cann", "torch", "torch_npu", "transformers", "python", "LLaMA-Factory"} <= machine.keys()
    assert machine["device"] == "card"
    assert "around each of 3 runs, after 1 that are not counted" in written["method"]
    assert written["models"][0]["vocab_size"] == 32
    for own in (str(tmp_path), str(Path.home()), platform.node(), f"/{getpass.getuser()}/"):
        assert own not in text


def result(provider: str, refused: str | None = None, direction: str = "forward", **figures: float) -> Result:
    """A result of one call, written by hand."""
    call = ("Qwen3-8B", "bf16", "prefill, 1 × 16", "RMSNorm", "Qwen3RMSNorm", "model.norm", [[1, 16, 64]])
    return Result(*call, provider, direction, None if refused else 1e-3, figures, refused, wrong=refused is not None)


def test_a_line_has_the_figures_of_all_who_computed_it() -> None:
    results = [result("transformers", median_ms=2.0, repeats=50), result("LLaMA-Factory", median_ms=1.5)]
    results.append(result("kernels-ext-npu", "raised OSError"))
    (alone,), (line,) = (results_layout.report_lines(some) for some in (results[:1], results))
    assert "LLaMA-Factory" not in alone  # who is not installed has no column
    assert (line["of"], line["what"], line["dtype"]) == ("Qwen3-8B", "RMSNorm, prefill, forward", "bf16")
    assert line["transformers"] == {"distance": 1e-3, "median_ms": 2.0, "repeats": 50}
    assert line["LLaMA-Factory"] == {"distance": 1e-3, "median_ms": 1.5}
    assert line["kernels-ext-npu"] == {"refused": "raised OSError"}


def test_lines_that_decide_claims_are_lines_of_a_report() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text("utf-8")
    table = page.partition("Of the benchmark")[2].partition("\n## ")[0]
    rows = [row.rpartition(" | ")[2] for row in table.splitlines() if row.startswith("|")]
    named = {tuple(line.split(", ", 1)) for row in rows for line in re.findall("`([^`]+, [^`]+)`", row)}
    assert len(named) > 10
    pairs = next(operator_pairs.run("bf16", shrink=512, repeats=2))
    (line,) = results_layout.report_lines([pairs])
    assert (line["of"], line["what"]) in named
    named -= {(line["of"], line["what"])}
    for name in {model for model, _ in named}:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shrunk_models.load(name, 8).config)
        kernels = {call.kernel for call in recorded_calls.find_calls(model)} | {
            recorded_calls.STEP,
            recorded_calls.HEAD,
        }
        assert {line for model, line in named if model == name} <= section_lines(kernels)
    assert {name for name, _ in named} <= set(PUBLISHED)
    from_kernels = {line.partition(",")[0] for _, line in named}
    without = {path.parent.name for path in ROOT.glob("*/build.toml")} - from_kernels
    assert without == {"Activation", "Linear"}  # and the page says why
