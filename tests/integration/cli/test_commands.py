"""What commands write where nobody looks at a terminal, and without a network, with a full disk, or no home.

What needs no network asks for none: tests/test_packaging.py runs selftest behind a proxy that is dead.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from kernels_ext_npu.cli.terminal import write_file
from kernels_ext_npu.environment import RefusedError
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


@pytest.mark.parametrize("columns", [40, 60, 80])
@each_command
def test_labels_are_whole_however_narrow(name: str, columns: int) -> None:
    output = ran(name, columns=columns)
    assert all(label in output for label in LABELS[name])
    assert not re.search(r"[ \t]$", output, re.MULTILINE)
    assert "┃" not in output  # one kind of table
    assert "─────" in output


@each_command
def test_an_encoding_without_the_characters_of_tables_is_no_error(name: str) -> None:
    assert "?" not in ran(name, charset="ascii")


@each_command
def test_json_is_all_that_is_written(name: str) -> None:
    json.loads(ran(name, "--json"))


def test_help_needs_no_torch(run_python) -> None:
    code = """
import sys
from kernels_ext_npu.cli import app
names = [command.callback.__name__ for command in app.registered_commands]
for arguments in ([], *([name] for name in names)):
    app([*arguments, "--help"], standalone_mode=False)
assert not {"torch", "transformers"} & sys.modules.keys()
print(names)
"""
    *usage, names = run_python(code).stdout.splitlines()
    assert sum("Usage: " in line for line in usage) == 1 + len(ast.literal_eval(names))


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
    result = run_python(f"{code}app(['verify', '--help'])", check=False)
    assert result.returncode == 2
    assert "kernels-ext-npu: [Errno 28] No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


# ---- where nothing answers, and nothing can be written ---------------------------------------------------------------
COMMAND = "from kernels_ext_npu.cli import app; app()"
HOME = {"HOME": "/proc", "XDG_CACHE_HOME": ""}  # which root cannot write to, either
SOFTNPU = "Set XDG_CACHE_HOME to a folder that you may write to."


def refused(run_python, code: int, *arguments: str, **environment: str) -> str:
    """Run a command that cannot do what it is asked for, and return the one line that it writes."""
    result = run_python(COMMAND, *arguments, check=False, **environment)
    assert (result.returncode, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("kernels-ext-npu: ")
    return line


@pytest.mark.software
@pytest.mark.parametrize("command", [["demo"], ["inspect", "qwen3"], ["benchmark"], ["selftest"], ["coverage"]])
def test_a_home_that_cannot_be_written_leaves_no_software_device(run_python, command: list[str]) -> None:
    assert refused(run_python, 2, *command, **HOME).endswith(SOFTNPU)


def test_a_machine_without_a_compiler_has_no_software_device(run_python, tmp_path: Path) -> None:
    result = run_python(COMMAND, "demo", check=False, CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 2
    assert "found no C compiler ('no-such-compiler')" in result.stderr


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(RefusedError, match=r"^--output /dev/full cannot be written: No space left on device$"):
        write_file("--output", Path("/dev/full"), "a report")
