"""softnpu/README.md names every file, shows the formula that is there, and tells the way that a call takes."""

import re
import sys
from pathlib import Path
from types import FrameType

import torch

import softnpu
from tests.support import pages

FOLDER = Path(softnpu.__file__).resolve().parent
PAGE = pages.read(FOLDER / "README.md")


def test_the_tree_has_a_line_for_every_file_and_no_other() -> None:
    folders, named = [], []
    for line in PAGE.code("Tree", language="").splitlines():
        if not line:
            continue
        indent, name, said = re.fullmatch(r"( *)(\S+)(.*)", line).groups()
        folders = folders[: len(indent) // 2]
        assert said.strip() or not folders, name
        if name.endswith("/"):
            folders.append(name)
        else:
            named.append("".join([*folders[1:], name]))
    held = [p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert sorted(named) == sorted(set(held) - {"README.md"})


def test_torch_add_goes_through_the_functions_that_are_listed() -> None:
    text = PAGE.code("From `torch.add` down to the bytes", language="")
    listed = re.findall(r"^ +(\w+)\.(\w+)\b", text, re.MULTILINE)
    a = torch.ones(2, 3, device="npu")
    called: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event == "call" and path.is_relative_to(FOLDER) and not name.startswith(("<", "__")):
            called[path.stem, name] = None

    sys.setprofile(note)
    try:
        torch.add(a, a)
    finally:
        sys.setprofile(None)
    assert listed == list(called)


def test_the_formula_that_is_shown_is_the_one_of_its_file() -> None:
    assert PAGE.code("How an operator is added") in (FOLDER / "formulas" / "glu.py").read_text()
