"""`make test-faults`: what it has written down is of the faults and tests that there are."""

import ast
import re

import build

from planting.faults import FAULTS
from planting.record import PAGE

ROW = re.compile(r"^\| (\w+) \| `([\w.]+)` \| (.+) \| `([\w/]+\.py)`, `(\w+)` \|$", re.MULTILINE)


def recorded() -> list[tuple[str, ...]]:
    return ROW.findall((build.ROOT / PAGE).read_text("utf-8"))


def test_the_record_has_every_fault_once() -> None:
    assert [f"{repository}/{file}: {what}" for repository, file, what, *_ in recorded()] == [f.name for f in FAULTS]


def test_a_test_that_saw_a_fault_is_still_there() -> None:
    functions: dict[str, set[str]] = {}
    for *_, path, function in recorded():
        if path not in functions:
            tree = ast.parse((build.ROOT / path).read_text("utf-8"))
            functions[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in functions[path], f"{path} has no {function} any more: make test-faults ARGS=--record"
