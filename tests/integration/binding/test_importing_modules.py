"""Modules that have imported a function by its name are found, also those that are imported or replaced later."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kernels_ext_npu.binding import patches
from kernels_ext_npu.binding.patches import FLEX_ATTENTION, LONGEST, modules_with

NAME = "a_file_of_somebody"


def module(**own: object) -> ModuleType:
    made = ModuleType(NAME)
    vars(made).update(own)
    return made


def test_a_module_is_found_by_what_it_has_and_not_once_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NAME not in modules_with(FLEX_ATTENTION)
    for own, found in (({FLEX_ATTENTION: len}, True), ({}, False), ({FLEX_ATTENTION: len, LONGEST: len}, True)):
        made = module(**own)
        monkeypatch.setitem(sys.modules, NAME, made)
        assert (modules_with(FLEX_ATTENTION).get(NAME) is made) is found
        assert (NAME in modules_with(LONGEST)) is (LONGEST in own)
    monkeypatch.delitem(sys.modules, NAME)
    assert NAME not in modules_with(FLEX_ATTENTION)


def test_what_a_module_imports_behind_the_question_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is imported just now is looked at again."""
    asking = "from kernels_ext_npu.binding.patches import modules_with\n"
    (tmp_path / f"{NAME}.py").write_text(f"{asking}seen = {NAME!r} in modules_with({LONGEST!r})\n{LONGEST} = len\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        made = importlib.import_module(NAME)
        assert not made.seen
        assert modules_with(LONGEST)[NAME] is made
    finally:
        sys.modules.pop(NAME, None)


def test_a_module_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modules_with(LONGEST)
    monkeypatch.setitem(sys.modules, NAME, module())
    looked_at, look_at = [], patches._look_at
    monkeypatch.setattr(patches, "_look_at", lambda name, each: looked_at.append(name) or look_at(name, each))
    for _ in range(2):
        modules_with(LONGEST)
    assert looked_at.count(NAME) == 1


def test_what_a_script_imports_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    script = sys.modules["__main__"]
    assert "__main__" not in modules_with(LONGEST)
    monkeypatch.setattr(script, LONGEST, len, raising=False)
    assert modules_with(LONGEST)["__main__"] is script
