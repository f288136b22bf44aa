"""tests/data/limits.toml: it has each operator that a kernel calls, and says of each limit who says so."""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "tests" / "data" / "limits.toml"
TABLES: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text())
AUTOGRAD = "autograd of "


def callers() -> dict[str, set[str]]:
    """The files that call an operator of torch_npu, such as npu.npu_swiglu, or an attribute of that name.

    Of kernels, and of what writes caches.
    """
    found: dict[str, set[str]] = defaultdict(set)
    folders = ("*/torch-ext/**", "common", "integration/kernels_ext_npu/decoding")
    for file in (path for folder in folders for path in ROOT.glob(f"{folder}/*.py") if "_common" not in path.parts):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_npu_operator = isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "npu"
                found["npu." * is_npu_operator + node.func.attr].add(str(file.relative_to(ROOT)))
    return found


def test_a_table_names_the_files_that_call_its_operator_and_each_of_torch_npu_has_one() -> None:
    """``_npu_dropout`` is what torch's own native_dropout ends in; ``aten_mm_dtype`` is mm with another dtype."""
    called = callers()
    assert {name.removeprefix("npu.") for name in called if name.startswith("npu.npu_")} <= TABLES.keys()
    for name, table in TABLES.items():
        files = {one for one in table["called_from"] if not one.startswith(AUTOGRAD)}
        plain = {"_npu_dropout": "native_dropout", "aten_mm_dtype": "mm"}.get(name, name.removeprefix("aten_"))
        if f"npu.{name}" in called:
            assert files == called[f"npu.{name}"], name
        else:
            assert files <= called[plain] | called[f"{plain}_"], name


def test_every_gradient_that_autograd_calls_for_them_has_a_table() -> None:
    for name, table in TABLES.items():
        gradient = re.fullmatch(r"(npu_\w+)( from [\d.]+ on)?", table.get("gradient", "none"))
        assert gradient is None or gradient[1] in TABLES, name
        for origin in (one.removeprefix(AUTOGRAD) for one in table["called_from"] if one.startswith(AUTOGRAD)):
            assert TABLES[origin]["gradient"] == name
