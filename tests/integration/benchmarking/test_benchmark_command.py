"""`kernels-ext-npu benchmark`: what it compares, counts and refuses, with small configs in place of the models' own."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers.models.qwen3_moe import modeling_qwen3_moe

from kernels_ext_npu.binding import registration
from kernels_ext_npu.distribution import sources
from tests.integration.benchmarking.benchmark_runs import EXPERTS, HIDDEN, SMALL, TOKENS, rows, run, write_config


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of everything there is in a small mixture of experts."""
    path = write_config(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", **EXPERTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "llamafactory", None)  # not there, whatever is installed
        return run("--model", path, *SMALL, "--json")


@pytest.fixture(scope="module")
def report(mixture) -> dict:
    return json.loads(mixture.stdout)


def test_everything_is_measured_and_ours_agrees(mixture, report) -> None:
    assert mixture.exit_code == 0, mixture.stderr
    parts = {"RMSNorm", "RoPE", "FusedMoE", "FlashAttention"}
    assert {row["kernel"] for row in report["results"]} == parts | {"CrossEntropy", "layer", "step"}
    assert {row["name"] for row in rows(report, kernel="FusedMoE")} == {"Qwen3MoeExperts", "Qwen3MoeTopKRouter"}
    for provider in ("transformers", "kernels-ext-npu"):
        assert not [row for row in rows(report, provider=provider) if "refused" in row]
        for phase, directions in (("prefill", {"forward"}), ("training", {"forward", "backward", "both"})):
            layers = rows(report, provider=provider, phase=phase, kernel="layer")
            assert {row["direction"] for row in layers} == directions
    for one, other in zip(rows(report, provider="transformers"), rows(report, provider="kernels-ext-npu")):
        assert (one["path"], one["phase"], one["direction"]) == (other["path"], other["phase"], other["direction"])
        if one["kernel"] != "CrossEntropy":  # pieces of a vocabulary: with 32 words there is nothing to save
            assert other["launches"] <= one["launches"]
            assert other["bytes"] < one["bytes"]
        assert other.get("host_waits", 0) == 0  # which a card does not tell
    assert registration.current is None
    assert "forward" not in vars(modeling_qwen3_moe.apply_rotary_pos_emb)


def test_counts_are_those_of_the_operator(report) -> None:
    """One launch of npu_rms_norm: it reads hidden states and weight, and writes as much and rstd in float32."""
    norms = rows(report, kernel="RMSNorm", phase="prefill", provider="kernels-ext-npu")
    (row,) = [row for row in norms if row["shapes"] == [[1, TOKENS, HIDDEN]]]
    hidden_states, weight, rstd = 2 * TOKENS * HIDDEN, 2 * HIDDEN, 4 * TOKENS
    assert (row["launches"], row["bytes"]) == (1, 2 * hidden_states + weight + rstd)
    # blocks are asked for with 32 bytes more, which the device's copies may touch
    assert hidden_states + rstd <= row["peak_memory_bytes"] <= hidden_states + rstd + 2 * 512


@pytest.mark.software
def test_it_says_where_figures_come_from_and_gives_no_times(mixture, report) -> None:
    keys = set(re.findall('"([^"]+)":', mixture.stdout))
    assert not [key for key in keys if any(part in key for part in ("ms", "time", "quartile", "second"))]
    assert "The software device computes on the host" in report["note"]
    assert "measures no times" in mixture.stderr
    assert "median" not in mixture.stderr
    assert "LLaMA-Factory not installed" in mixture.stderr
    assert report["device"].startswith("software device")
    assert {"torch", "torch_npu", "transformers", "kernels", "cann"} <= report["versions"].keys()
    assert report["versions"]["LLaMA-Factory"] == "not installed"
    (model,) = report["models"].values()
    assert model["sizes"]["hidden_size"] == HIDDEN
    assert model["source"].endswith("config.json")
    assert "2 and 4 times what the original differs" in report["tolerance"]


@pytest.mark.software  # a card has columns of times besides
def test_the_table_is_for_people(tmp_path: Path) -> None:
    options = ["--dtype", "float16", "--tokens", TOKENS, "--shrink", 1, "--kernel", "swiglu"]
    result = run("--model", write_config(tmp_path, "llama"), *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any("fp16: transformers / kernels-ext-npu" in line for line in lines)
    mlp = [line for line in lines if "LlamaMLP" in line]
    assert [line.split()[2] for line in mlp] == ["forward", "forward", "forward", "backward", "both"]
    # two products, silu, mul, a product; a product, npu_swiglu, a product
    assert mlp[0].split()[3:6] == ["5", "/", "3"]


# --- a wrong kernel


def change(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    """Give the layer of norms another function, which gets the right one."""
    layer = sources.layer_sources("bundled", {"RMSNorm": "RMSNorm"})["RMSNorm"].load()
    names = layer.forward.__globals__
    right = names["unchecked_rms_norm"]
    monkeypatch.setitem(names, "unchecked_rms_norm", lambda *arguments: wrong(right(*arguments)))


PHASES = {"prefill", "decode", "training"}


def spoil_gradient(y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 1.03)
    return y


def fail(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("error 561002")


@pytest.mark.parametrize(
    ("wrong", "said", "phases"),
    [
        (lambda y: y * 1.03, "output 0 is 3.0e-02 away from float32", PHASES),
        (spoil_gradient, "gradient of input 0 is 3.", {"training"}),
        (fail, "raised RuntimeError: error 561002", PHASES),
    ],
)
def test_a_wrong_kernel_has_no_figures(monkeypatch, tmp_path: Path, wrong, said, phases) -> None:
    change(monkeypatch, wrong)
    result = run("--model", write_config(tmp_path, "llama"), *SMALL, "--kernel", "RMSNorm", "--json")
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
