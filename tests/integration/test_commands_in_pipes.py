"""What commands write where nobody looks at a terminal: no blanks at the ends of lines, any encoding, whole labels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST = """
import os, sys
import softnpu, torch, transformers, kernels_ext_npu.coverage.survey, kernels_ext_npu.inspection.inspecting
from kernels_ext_npu.cli import app
"""
COMMANDS = {
    "verify": ["verify", str(ROOT / "RMSNorm"), "--torch", "2.8", "--cann", "8.2", "--arch", "aarch64"],
    "coverage": ["coverage", "qwen3"],
    "inspect": ["inspect", "qwen3", "--tokens", "64"],
}
LABELS = {
    "verify": ["torch26-cxx11-cann82-aarch64-linux", "signature"],
    "coverage": ["apply_rotary_pos_emb", "class or function"],
    "inspect": ["apply_rotary_pos_emb", "launches", "host waits"],
}


def ran(run_forks, change: str, *more: str) -> dict[str, str]:
    """Run all commands after a change to their process, and return what each wrote to standard output."""
    codes = [f"{change}; app({[*arguments, *more]!r})" for arguments in COMMANDS.values()]
    results = run_forks(FIRST, codes, COLUMNS="80")
    return {name: result.stdout for name, result in zip(COMMANDS, results)}


def test_lines_have_no_blanks_at_their_ends(run_forks) -> None:
    for name, output in ran(run_forks, "pass").items():
        assert not re.search(r"[ \t]$", output, re.MULTILINE), name
        assert "┃" not in output  # one kind of table
        assert "─────" in output


@pytest.mark.parametrize("columns", [40, 60])
def test_labels_are_whole_however_narrow(run_forks, columns: int) -> None:
    for name, output in ran(run_forks, f"os.environ['COLUMNS'] = '{columns}'").items():
        for label in LABELS[name]:
            assert label in output, name


def test_an_encoding_without_the_characters_of_tables_is_no_error(run_forks) -> None:
    for output in ran(run_forks, "sys.stdout.reconfigure(encoding='ascii')").values():
        assert output.isascii()
        assert "Traceback" not in output
        assert "?" not in output


def test_json_is_all_that_is_written(run_forks) -> None:
    for output in ran(run_forks, "pass", "--json").values():
        json.loads(output)


def test_what_a_command_did_not_expect_is_no_output(run_python) -> None:
    """torch_npu prints to standard output at the end of a process that an exception has ended."""
    code = """
import softnpu, torch, torch_npu
from kernels_ext_npu.coverage import survey
from kernels_ext_npu.cli import app
def fail(*arguments):
    raise RuntimeError("nobody thought of this")
survey.survey = fail
app(["coverage", "--json"])
"""
    result = run_python(code, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "RuntimeError: nobody thought of this" in result.stderr


def test_a_full_disk_is_a_sentence(run_python) -> None:
    code = "import sys; sys.stdout = open('/dev/full', 'w'); from kernels_ext_npu.cli import app; "
    result = run_python(f"{code}app({COMMANDS['verify']!r})", check=False)
    assert result.returncode == 2
    assert "kernels-ext-npu: [Errno 28] No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
