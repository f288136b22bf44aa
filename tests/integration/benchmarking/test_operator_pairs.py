"""Pairs of operators that compute the same: both are compared, counted, and refused where they differ."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from kernels_ext_npu.benchmarking import operator_pairs
from kernels_ext_npu.benchmarking.operator_pairs import PAIRS, TORCH, run
from kernels_ext_npu.benchmarking.providers import OURS
from kernels_ext_npu.cli import app


def test_both_calls_of_each_pair_agree_and_are_counted() -> None:
    results = list(run("bf16", shrink=512, repeats=2))
    assert [(result.name, result.provider) for result in results] == [
        (pair.name, provider) for pair in PAIRS for provider in (TORCH, OURS)
    ]
    assert [result.refused for result in results] == [None] * len(results)
    assert all(result.figures["kernels"] >= result.figures["launches"] > 0 for result in results)
    assert all("median_ms" not in result.figures for result in results)  # no times of a software device


def test_writing_a_token_into_a_cache_moves_the_token_alone() -> None:
    """torch's operator transposes the whole cache there and back, two passes each, and the token."""
    longest = [result for result in run("bf16", shrink=512, repeats=2) if result.name == PAIRS[2].name][-2:]
    cache = 8 * 64 * 128 * 2  # of one row, 64 tokens
    moved = {result.provider: result.figures["bytes"] for result in longest}
    assert moved[TORCH] > 4 * cache
    assert moved[OURS] < cache / 10


def test_a_call_that_differs_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(PAIRS[-1], ours=lambda counts: counts)
    monkeypatch.setattr(operator_pairs, "PAIRS", (wrong,))
    plain, ours = run("bf16", shrink=512, repeats=2)
    assert plain.refused is None
    assert ours.wrong
    assert not ours.figures
    assert str(ours.refused).startswith("differs from torch's by ")


def test_the_command_measures_pairs_without_a_model() -> None:
    result = CliRunner().invoke(
        app, ["benchmark", "--kernel", "operators", "--dtype", "fp16", "--shrink", "512", "--json"]
    )
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["models"] == {}
    assert {row["name"] for row in said["results"]} == {pair.name for pair in PAIRS}
    assert {row["dtype"] for row in said["results"]} == {"fp16"}
