"""``kernels-ext-npu coverage``: what of transformers has a kernel, and why the rest has none."""

from __future__ import annotations

from collections import Counter

import pytest
from counted import counted
from typer.testing import CliRunner

from kernels_ext_npu import cli, coverage

pytestmark = pytest.mark.slow


@counted
def test_the_figures_are_these() -> None:
    entries = coverage.survey()
    assert Counter((entry.kind, entry.layer is not None) for entry in entries) == {
        ("norms", True): 205,
        ("norms", False): 8,
        ("gated MLPs", True): 160,
        ("gated MLPs", False): 32,
        ("experts", True): 63,
        ("experts", False): 8,
        ("routers", True): 14,
        ("routers", False): 58,
        ("rotary functions", True): 219,
        ("rotary functions", False): 17,
    }
    assert not [entry for entry in entries if entry.reason == coverage.UNKNOWN]
    assert all((entry.layer is None) != (entry.reason is None) for entry in entries)


def test_the_command_prints_layers_and_reasons() -> None:
    result = CliRunner().invoke(cli.app, ["coverage"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    for words in (
        "norms, served",
        "gated MLPs, kept",
        "experts, served",
        "SwiGLUMLP",
        "MoEExperts",
        "RotaryPosEmb",
        "clamps gate and up",
    ):
        assert words in result.output
