"""What GitHub reads in .github: forms that ask for what commands write, and a workflow that runs what make runs."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kernels_ext_npu.cli import app

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"


@pytest.mark.parametrize("name", ["problem", "card"])
def test_a_form_has_what_github_requires(name: str) -> None:
    form = yaml.safe_load((GITHUB / f"ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)


@pytest.mark.parametrize(
    ("form", "command", "option"),
    [("problem", "doctor", "--json"), ("card", "selftest", "--output"), ("card", "benchmark", "--report")],
)
def test_the_commands_that_a_form_asks_for_have_these_options(form: str, command: str, option: str) -> None:
    assert option in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    assert {command, option} <= set(re.findall(r"[\w-]+", (GITHUB / f"ISSUE_TEMPLATE/{form}.yml").read_text()))


def test_the_workflow_runs_the_script_of_this_tree() -> None:
    steps = yaml.safe_load((GITHUB / "workflows/tests.yml").read_text())["jobs"]["tests"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == [".ci/run"]
    assert (ROOT / commands[0]).stat().st_mode & 0o111
