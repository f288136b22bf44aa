"""The comparison with other projects: both languages say the same, and what is said of others can be looked up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
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
    # cell by cell, so that a source cannot slip to the neighbour
    link = re.compile(r"\[\d+\]|\]\([^)]+\)")
    english, chinese = ([[link.findall(cell) for cell in row] for row in _table(page)] for page in PAGES)
    assert english == chinese


@pytest.mark.parametrize("page", PAGES)
def test_every_cell_about_another_project_has_a_source(page: str) -> None:
    projects, *rows = _table(page)
    assert len(projects) == 7
    assert len(rows) >= 10
    for topic, _ours, *theirs in rows:
        assert len(theirs) == 5, topic
        assert all(re.search(r"\[\d+\]", cell) for cell in theirs), topic


@pytest.mark.parametrize("page", PAGES)
def test_sources_are_pinned_and_pages_exist(page: str) -> None:
    for target in _targets(page):
        if target.startswith("http"):
            assert PINNED.fullmatch(target), target
        else:
            assert (DOCS / target.split("#")[0]).is_file(), target
