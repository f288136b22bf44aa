"""docs/adding-a-kernel.md, followed to the letter in a copy of the project."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import build
import pytest

from kernels_ext_npu.distribution.variants import names
from tests.localhub import LocalHub
from tests.support.forking import Forks

# the page counts; its tests run in a clone of their own
pytestmark = [pytest.mark.software, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-a-kernel.md"
BLOCK = re.compile(
    r"(?:^`(?P<path>[^`\n]+)`:\n)?^(?P<fence>`{3,})(?P<language>\w+)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S
)
KERNEL = "kernels-ext-npu/QuickGELU"
COMMAND = "from kernels_ext_npu.cli import app; app()"

# After the last block of the page, in its process: a model that the page has not, served by the copy and by the Hub.
CHECK = """
import copy, json
import kernels_ext_npu
from torch import nn
from transformers.activations import ACT2FN

torch.manual_seed(0)
original = nn.Sequential(nn.Linear(16, 32), ACT2FN["quick_gelu"], nn.Linear(32, 16), ACT2FN["gelu"])
x, answers = torch.randn(3, 16), {"file": kernel.__file__}
for source in ("bundled", "hub"):
    kernels_ext_npu.register(source=source, kernels=["QuickGELU"])  # the only one on this Hub
    model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    softnpu.reset_counters()
    y = model(x.npu())
    y.square().sum().backward()
    torch.testing.assert_close(y.cpu(), original(x), rtol=1e-5, atol=1e-5)  # float32, and sums of at most 32 terms
    calls = softnpu.counters()
    answers[source] = {
        "calls": [calls["npu_fast_gelu"], calls["npu_fast_gelu_backward"]],
        "rows": {row.path: row.swapped for row in kernels_ext_npu.report(model)},
    }
print(json.dumps(answers))
"""

# whose tests a new operator and a new repository come under by themselves
COME_BY_THEMSELVES = (
    "tests/scripts/test_build.py",
    *(f"tests/variants/test_{what}.py" for what in ("choice", "functions", "layers")),
)


def steps() -> list[re.Match[str]]:
    """The blocks of the page, each a file, a change to one, or commands."""
    return list(BLOCK.finditer(PAGE.read_text()))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git holds, or would: a copy of the project."""
    root = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("the project is not in a git repository, which says what a clone would hold")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    with LocalHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def environment(clone: Path, hub: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of somebody who has made the environment of the copy."""
    paths = (clone, clone / "integration", clone / "scripts", clone / "tests")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ASCEND_")}
    return (
        inherited
        | hub.environment(tmp_path_factory.mktemp("home"))
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTEST_ADDOPTS": "-rp"}
    )


@pytest.fixture(scope="module")
def outputs(clone: Path, environment: dict[str, str], _forks: Forks) -> dict[str, str]:
    """Everything that the page says, in its order: command -> what it printed."""

    def run(code: str | None, *arguments: str) -> str:
        result = _forks.run(code, *arguments, directory=clone, inherited={}, given=environment)
        assert result.returncode == 0, f"{code} {arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def run_line(line: str) -> str:
        command, *arguments = shlex.split(line)
        if command == "rm":
            return subprocess.run([command, *arguments], cwd=clone, check=True, capture_output=True, text=True).stdout
        return run({"python": None, "kernels-ext-npu": COMMAND}[command], *arguments)

    printed = {}
    for step in steps():
        if step["language"] == "diff":
            change(clone / step["path"], step["text"])
        elif step["path"] is not None:
            assert not (clone / step["path"]).exists(), f"{step['path']} is not new"
            (clone / step["path"]).parent.mkdir(parents=True, exist_ok=True)
            (clone / step["path"]).write_text(step["text"])
        elif step["language"] == "sh":
            printed |= {line: run_line(line) for line in step["text"].splitlines()}
        else:
            printed["python"] = run(f"import softnpu\n{step['text']}\n{CHECK}")
    return printed


def change(path: Path, diff: str) -> None:
    """Put what a diff adds into a file; @@ lies between its changes."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        text = path.read_text()
        if before:
            assert f"\n{text}".count(f"\n{before}") == 1, f"{path.name} does not have this once:\n{before}"
            path.write_text(text.replace(before, after))
        else:
            path.write_text(text + after)


def printed_by(outputs: dict[str, str], start: str) -> str:
    (output,) = [text for command, text in outputs.items() if command.startswith(start)]
    return output


def test_the_tests_of_the_page_run(outputs) -> None:
    """Its own, and those of the project."""
    passed = re.findall(r"^PASSED ([^:]+)::(\w+)", printed_by(outputs, "python -m pytest"), re.MULTILINE)
    own = "tests/quick_gelu/test_quick_gelu.py"
    (text,) = [step["text"] for step in steps() if step["path"] == own]
    assert {name for path, name in passed if path == own} == set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    assert {path for path, _ in passed} == {own, *COME_BY_THEMSELVES}


def test_what_the_page_writes_is_as_the_project_writes(outputs, clone: Path) -> None:
    written = [step["path"] for step in steps() if step["path"] is not None and step["path"].endswith(".py")]
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        result = subprocess.run([sys.executable, "-m", *command, *written], cwd=clone, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_it_is_built_verified_and_published(outputs, clone: Path, hub: LocalHub) -> None:
    built = {path.name for path in (clone / "QuickGELU" / "build").iterdir()}
    assert built == {path.name for path in (ROOT / "RMSNorm" / "build").iterdir()}
    verified = printed_by(outputs, "kernels-ext-npu verify")
    assert all(re.search(rf"{name}\b.*\bintact\b", verified) for name in built)
    content = build.render(clone / "QuickGELU", names(clone))
    assert hub.repository(KERNEL).files("v1") == {f"build/{path}": text for path, text in content.items()}


def test_a_model_is_served_from_the_copy_and_from_the_hub(outputs, environment: dict[str, str]) -> None:
    *printed, answers = outputs["python"].splitlines()
    assert "tensor([0.8458, 0.8458]" in printed[-1]
    answers = json.loads(answers)
    assert answers["file"].startswith(environment["HF_HUB_CACHE"])
    assert "/build/torch-npu/" in answers["file"]
    assert answers["bundled"] == answers["hub"] == {"calls": [1, 1], "rows": {"1": True}}
