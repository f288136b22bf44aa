"""Forked processes are to a test what fresh ones are: the same program gives the same in both."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PROGRAM = """
import atexit, os, sys
atexit.register(print, "the end")
print(__name__, sys.argv[1:], os.getcwd(), {name: os.environ.get(name) for name in ("HF_HOME", "OF_THE_TEST")})
print("an error", file=sys.stderr)
import huggingface_hub.constants, softnpu, torch
print(huggingface_hub.constants.HF_HOME, torch.ones(2, device="npu").sum().item())
"""


def test_a_program_gives_the_same(run_python, run_forked, tmp_path: Path) -> None:
    options = {"directory": tmp_path, "HF_HOME": "/elsewhere", "OF_THE_TEST": "1"}
    fresh, forked = (run(PROGRAM, "a", "-b", **options) for run in (run_python, run_forked))
    assert (fresh.stdout, fresh.stderr) == (forked.stdout, forked.stderr)
    (tmp_path / "script.py").write_text(PROGRAM)
    assert run_forked(None, "script.py", "a", "-b", **options).stdout == fresh.stdout
    assert run_forked(None, "-m", "script", "a", "-b", **options).stdout == fresh.stdout


def test_it_has_imported_transformers_where_no_variables_are_given(run_forked) -> None:
    code = "import sys; print({'torch', 'transformers', 'tests'} & sys.modules.keys())"
    assert ast.literal_eval(run_forked(code).stdout) == {"torch", "transformers"}
    assert ast.literal_eval(run_forked(code, OF_THE_TEST="1").stdout) == {"torch"}


def test_a_program_that_fails_fails_the_test(run_forked) -> None:
    ends = {"1 / 0": "1\n.*ZeroDivisionError", "raise SystemExit('a sentence')": "1\n\na sentence"}
    for code, end in (ends | {"import os; os.kill(os.getpid(), 9)": "-9"}).items():
        with pytest.raises(AssertionError, match=f"(?s)ended with {end}"):
            run_forked(code)
