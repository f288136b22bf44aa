"""Write down which test saw which fault: docs/faults.md."""

from __future__ import annotations

from pathlib import Path

PAGE = Path("docs") / "faults.md"
_HEAD = """\
# Faults, and the tests that see them

Written by `make test-faults ARGS=--record`: each fault makes a line of a kernel wrong by one per cent, and beside it is
the first test that fails then. All other tests of its repository, which come behind, were not run.

| repository | file | what is one per cent too large | test |
|---|---|---|---|
"""


def page(seen: dict[str, str]) -> str:
    """Return the page for the tests that saw faults, by the names of these."""
    return _HEAD + "".join(_row(name, test) for name, test in seen.items())


def _row(name: str, test: str) -> str:
    place, _, what = name.partition(": ")
    repository, _, file = place.partition("/")
    path, _, function = test.partition("[")[0].partition("::")
    return f"| {repository} | `{file}` | {what} | `{path}`, `{function}` |\n"
