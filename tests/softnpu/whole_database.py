"""Whether torch's operator database agreed as a whole on the software device as it is; then a sample is enough.

The sample runs every operator that the whole launches, and every twentieth test beside. ``python -m
tests.softnpu.whole_database`` runs the whole, some minutes, and writes both down if it agrees.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import softnpu

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "softnpu" / "test_operator_database.py"
RECORD = ROOT / "tests" / "data" / "operator_database.json"
TEST_FILES = (TESTS, ROOT / "tests" / "data" / "operators.toml", ROOT / "tests" / "softnpu" / "operators.py")
EACH = 20


def state() -> str:
    """Return a digest of all that decides whether the tests pass."""
    digest = hashlib.sha256()
    for name in ("torch", "torch_npu"):
        digest.update(f"{name} {version(name).partition('+')[0]}\n".encode())
    sources = (path for path in (ROOT / "softnpu").rglob("*") if path.suffix in (".py", ".c", ".h"))
    for path in (*sorted(sources), *TEST_FILES):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def sample() -> frozenset[str] | None:
    """Return the names of the tests that are enough, or None if the whole was not run on this device."""
    record = json.loads(RECORD.read_text())
    return frozenset(record["sample"]) if record["state"] == state() else None


def header() -> list[str]:
    """Return a line for the top of pytest's output, if the whole runs."""
    if sample() is not None:
        return []
    return ["operator database: all of it, as softnpu, torch or torch_npu changed: see tests/softnpu/whole_database.py"]


def leave_to_long_runs(items: list[pytest.Item]) -> None:
    """Mark the tests ``long`` that are not in the sample, where the sample is enough."""
    enough = sample()
    for item in items if enough is not None else ():
        if item.path == TESTS and hasattr(item, "callspec") and item.name not in enough:
            item.add_marker(pytest.mark.long)


class Launches:
    """A plugin of pytest: the operators that each test which passes launches, by its name."""

    def __init__(self) -> None:
        self.by_test: dict[str, frozenset[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        softnpu.reset_counters()
        yield
        if hasattr(item, "callspec"):
            self.by_test[item.name] = frozenset(softnpu.counters())


def covering(launched: dict[str, frozenset[str]]) -> list[str]:
    """Choose tests that launch all operators, those first that launch most which no chosen one does."""
    chosen = list(launched)[::EACH]
    left = frozenset().union(*launched.values()).difference(*map(launched.get, chosen))
    while left:
        chosen.append(max(launched, key=lambda name: len(launched[name] & left)))
        left -= launched[chosen[-1]]
    return sorted(chosen)


def main() -> int:
    launches = Launches()
    code = pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS)], plugins=[launches])
    if code == 0:
        RECORD.write_text(json.dumps({"state": state(), "sample": covering(launches.by_test)}, indent=0) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
