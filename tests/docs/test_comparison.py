"""The comparison with other projects: both languages say the same, what is said of others can be looked up, and what is
said of this one is so.
"""

import inspect
import re
from pathlib import Path

import pytest

import kernels_ext_npu
from kernels_ext_npu.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ["comparison.md", "comparison.zh.md"]
# a branch moves on, and with it the lines that a link names
PINNED = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/"
    r"(blob/([0-9a-f]{40}|v\d+(\.\d+)+)/[^#\s]+#L\d+(-L\d+)?"
    r"|tree/([0-9a-f]{40}|v\d+(\.\d+)+)/[^#\s]+"
    r"|releases/tag/v\d+(\.\d+)+"
    r"|(pull|issues)/\d+)"
)


def _targets(page: str) -> list[str]:
    """Where the links of a page lead, in the order of the text."""
    text = (DOCS / page).read_text()
    defined = dict(re.findall(r"^\[(\d+)\]: (\S+)$", text, re.MULTILINE))
    text = re.sub(r"^\[\d+\]: \S+$", "", text, flags=re.MULTILINE)
    uses = re.findall(r"\]\(([^)]+)\)|\[(\d+)\]", text)
    assert {number for _, number in uses if number} == set(defined), "a number without a source, or the other way round"
    return [target or defined[number] for target, number in uses]


def _table(page: str) -> list[list[str]]:
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("|---")]


def test_both_languages_have_the_same_links_and_cells() -> None:
    english, chinese = ([target.replace(".zh.md", ".md") for target in _targets(page)] for page in PAGES)
    assert english == chinese
    # cell by cell, so that a source cannot slip to the neighbour, and what is code is no translation
    linked = re.compile(r"\[\d+\]|\]\([^)]+\)|`[^`]+`")
    english, chinese = ([[sorted(linked.findall(cell)) for cell in row] for row in _table(page)] for page in PAGES)
    assert english == chinese


@pytest.mark.parametrize("page", PAGES)
def test_every_cell_about_another_project_has_a_source(page: str) -> None:
    projects, *rows = _table(page)
    assert len(projects) == 7
    assert len(rows) >= 10
    for topic, _ours, *theirs in rows:
        assert len(theirs) == 5, topic
        assert all(re.search(r"\[\d+\]", cell) for cell in theirs), topic


def test_sources_are_pinned() -> None:
    """That its other links lead somewhere is asked of the site."""
    assert [t for t in _targets(PAGES[0]) if t.startswith("http") and not PINNED.fullmatch(t)] == []


def test_calls_and_commands_of_ours_exist() -> None:
    """All that is code in our cells: a function with its argument, a keyword of `register`, a command."""
    cells = " ".join(row[1] for row in _table("comparison.md")[1:])
    commands = {command.callback.__name__ for command in app.registered_commands}
    elsewhere = {
        "use_kernels=True",  # transformers'
        "(1 + weight)",
        "npu_rotary_mul",  # torch_npu's
        *("torch.compile", "fullgraph=True", "aot_eager"),  # torch's
    }
    found = set(re.findall(r"`([^`]+)`", cells)) - elsewhere
    assert len(found) > 5
    for code in found:
        if code.startswith("kernels-ext-npu "):
            assert code.split()[1] in commands, code
        elif call := re.fullmatch(r"(\w+)\((\w*)(?:=\w+)?\)", code):
            parameters = inspect.signature(getattr(kernels_ext_npu, call[1])).parameters
            assert not call[2] or call[2] in parameters, code
        else:
            assert code.partition("=")[0] in inspect.signature(kernels_ext_npu.register).parameters, code
