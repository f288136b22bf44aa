"""tests/data/limits.toml: it has each operator that a kernel calls, and says of each limit who says so."""

import ast
import re
import sys
from collections import defaultdict
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


def callers() -> dict[str, set[str]]:
    """The files of kernels that call an operator of torch_npu, such as npu.npu_swiglu, or an attribute of that name."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in ROOT.glob("*/torch-ext/*/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_npu = isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "npu"
                found["npu." * of_npu + node.func.attr].add(str(file.relative_to(ROOT)))
    return found


def test_a_table_names_the_files_that_call_its_operator_and_each_of_torch_npu_has_one() -> None:
    """``_npu_dropout`` is what torch's own native_dropout ends in; ``aten_mm_dtype`` is mm with another dtype."""
    called = callers()
    assert {name.removeprefix("npu.") for name in called if name.startswith("npu.npu_")} <= TABLES.keys()
    for name, table in TABLES.items():
        files = {one for one in table["called_from"] if not one.startswith(AUTOGRAD)}
        plain = {"_npu_dropout": "native_dropout", "aten_mm_dtype": "mm"}.get(name, name.removeprefix("aten_"))
        if name.startswith("npu_"):
            assert files == called[f"npu.{name}"], name
        else:
            assert files <= called[plain] | called[f"{plain}_"], name


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
