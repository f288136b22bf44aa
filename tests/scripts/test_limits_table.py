"""tests/data/limits.toml: it has each operator that a kernel calls, and says of each limit who says so."""

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "tests" / "data" / "limits.toml"
TABLES: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text())
RELEASES = ["8.2", "8.3", "8.5", "9.0", "9.1"]
CHIPS = {"A2", "A3"}
HEAD = FILE.read_text().split("\n\n")[0].splitlines()
KINDS = set(" ".join(line[2:] for line in HEAD).partition(" kind: ")[2].partition(". ")[0].split(", "))
SOURCE = re.compile(r"(op-plugin|pytorch|transformer|transformer83|nn|math) \S+( v?[0-9a-f][\w.-]*(:\d+)?)+")
AUTOGRAD = "autograd of "


@cache
def called(file: str) -> set[str]:
    """The operators of torch_npu that a file of a kernel calls, and the attributes that it calls of anything else."""
    calls = [node.func for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.Call)]
    names = [call for call in calls if isinstance(call, ast.Attribute)]
    of_npu = [name for name in names if isinstance(name.value, ast.Attribute) and name.value.attr == "npu"]
    return {name.attr for name in names} | {f"npu.{name.attr}" for name in of_npu}


def operators_of(file: str) -> set[str]:
    return {name.removeprefix("npu.") for name in called(file) if name.startswith("npu.npu_")}


SOURCES = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("*/torch-ext/*/*.py"))


def test_every_operator_of_torch_npu_that_a_kernel_calls_has_a_table() -> None:
    callers: dict[str, set[str]] = {}
    for file in SOURCES:
        for name in operators_of(file):
            callers.setdefault(name, set()).add(file)
    listed = {name: {one for one in table["called_from"] if "/" in one} for name, table in TABLES.items()}
    assert {name: files for name, files in listed.items() if files and name.startswith("npu_")} == callers


def test_every_gradient_that_autograd_calls_for_them_has_a_table() -> None:
    for name, table in TABLES.items():
        gradient = re.fullmatch(r"(npu_\w+)( from [\d.]+ on)?", table.get("gradient", "none"))
        assert gradient is None or gradient[1] in TABLES, name
        for origin in (one.removeprefix(AUTOGRAD) for one in table["called_from"] if one.startswith(AUTOGRAD)):
            assert TABLES[origin]["gradient"] == name


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_form_of_the_head(name: str) -> None:
    table = TABLES[name]
    assert set(table) <= {"called_from", "present", "gradient", "page", "not_found", "limit"}
    assert table["present"] == [release for release in RELEASES if release in table["present"]] != []
    missing = {one.split(":")[0].split(" (")[0] for one in table.get("not_found", ())}
    assert missing <= KINDS
    for limit in table["limit"]:
        assert {"releases", "kind", "says"} <= set(limit) <= {"releases", "kind", "says", "source", "chips"}
        assert limit["releases"] == [release for release in RELEASES if release in limit["releases"]] != []
        assert limit["says"] == "absent" or set(limit["releases"]) <= set(table["present"])
        assert set(limit["releases"]).isdisjoint(table["present"]) or limit["says"] != "absent"
        assert limit["kind"] in KINDS
        assert set(limit.get("chips", CHIPS)) <= CHIPS
        assert limit.get("source") or limit["kind"] in missing, limit["says"]
        assert all(SOURCE.fullmatch(source) for source in limit.get("source", ())), limit["source"]


@pytest.mark.parametrize("name", TABLES)
def test_the_files_that_a_table_names_call_its_operator(name: str) -> None:
    """``_npu_dropout`` is what torch's own native_dropout ends in; ``aten_mm_dtype`` is mm with another dtype."""
    plain = {"_npu_dropout": "native_dropout", "aten_mm_dtype": "mm"}.get(name, name.removeprefix("aten_"))
    names = {f"npu.{name}"} if name.startswith("npu_") else {plain, f"{plain}_"}
    for file in TABLES[name]["called_from"]:
        if not file.startswith(AUTOGRAD):
            assert names & called(file), file
