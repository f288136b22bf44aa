"""Run commands of kernels-ext-npu in this process, and read what they write."""

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from kernels_ext_npu.cli import app


def run(*arguments: object, columns: int = 80, charset: str = "utf-8") -> Result:
    """Run a command in a terminal of so many columns."""
    return CliRunner(charset=charset).invoke(app, [str(each) for each in arguments], env={"COLUMNS": str(columns)})


def said(*arguments: object) -> str:
    """Return all that a command writes, in one line however it was wrapped."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def report(*arguments: object) -> dict[str, Any]:
    """Return the JSON that is all that a command writes to standard output."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: object, code: int = 2) -> str:
    """Return what a command says that ends with a code, in one line: a sentence, and no traceback."""
    result = run(*arguments, columns=300)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())
