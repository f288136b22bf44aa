"""What commands write where nobody looks at a terminal: no blanks at the ends of lines, any encoding, whole labels."""

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "integration/kernels_ext_npu/model_configs/tiny/Qwen3.json"
COMMANDS = {
    "verify": ["verify", str(ROOT / "RMSNorm"), "--torch", "2.8", "--cann", "8.2", "--arch", "aarch64"],
    "coverage": ["coverage", "qwen3"],
    "inspect": ["inspect", str(MODEL), "--tokens", "64"],
}
LABELS = {
    "verify": ["torch26-cxx11-cann82-aarch64-linux", "signature"],
    "coverage": ["apply_rotary_pos_emb", "class or function"],
    "inspect": ["apply_rotary_pos_emb", "launches", "waits"],  # headings may take two lines
}
each_command = pytest.mark.parametrize("name", COMMANDS)


def ran(name: str, *more: str, charset: str = "utf-8", columns: int = 80) -> str:
    """Run a command, and return what it writes to standard output."""
    result = run(*COMMANDS[name], *more, charset=charset, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout


@each_command
def test_lines_have_no_blanks_at_their_ends(name: str) -> None:
    output = ran(name)
    assert not re.search(r"[ \t]$", output, re.MULTILINE)
    assert "┃" not in output  # one kind of table
    assert "─────" in output


@pytest.mark.parametrize("columns", [40, 60])
@each_command
def test_labels_are_whole_however_narrow(name: str, columns: int) -> None:
    output = ran(name, columns=columns)
    assert all(label in output for label in LABELS[name])


@each_command
def test_an_encoding_without_the_characters_of_tables_is_no_error(name: str) -> None:
    assert "?" not in ran(name, charset="ascii")


@each_command
def test_json_is_all_that_is_written(name: str) -> None:
    json.loads(ran(name, "--json"))


def test_what_a_command_did_not_expect_is_no_output(run_forked) -> None:
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
    result = run_forked(code, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "RuntimeError: nobody thought of this" in result.stderr


def test_a_full_disk_is_a_sentence(run_python) -> None:
    code = "import sys; sys.stdout = open('/dev/full', 'w'); from kernels_ext_npu.cli import app; "
    result = run_python(f"{code}app({COMMANDS['verify']!r})", check=False)
    assert result.returncode == 2
    assert "kernels-ext-npu: [Errno 28] No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
