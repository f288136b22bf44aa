"""Names in the code: none is ``of_…`` or ``…_of``, and words that had several meanings stay where they have one.

The words are those of `docs/glossary.md`.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("integration/**/*.py", "*/torch-ext/**/*.py", "common/**/*.py", "softnpu/**/*.py", "scripts/**/*.py")
# word -> the folders and files where names may have it
ROOMS = {
    "gate": (
        *("FusedMoE", "LinearAttention", "RMSNorm", "SwiGLU", "common", "softnpu"),
        "integration/kernels_ext_npu/catalogue.py",  # forget gates
        "integration/kernels_ext_npu/recognition",  # gate and up of an MLP, gated norms
        "integration/kernels_ext_npu/patterns",  # names of transformers
        "integration/kernels_ext_npu/selftest",
        "integration/kernels_ext_npu/swaps",  # gate and up of an MLP
    ),
    "variant": (
        "integration/kernels_ext_npu/cli/verify.py",
        "integration/kernels_ext_npu/distribution",
        "integration/kernels_ext_npu/doctor/checks",
        "scripts",
    ),
    "packing": ("FlashAttention", "SwiGLU/torch-ext/swiglu/packing.py"),  # the latter is a public name
    "pattern": (
        "FlashAttention",
        "integration/kernels_ext_npu/binding",
        "integration/kernels_ext_npu/context_parallel",
        "integration/kernels_ext_npu/matching",
        "integration/kernels_ext_npu/recognition/moe_blocks",
        "integration/kernels_ext_npu/patterns",
        "integration/kernels_ext_npu/selftest",
        "integration/kernels_ext_npu/swaps",
    ),
    "unit": ("FlashAttention", "LinearAttention", "SwiGLU", "integration/kernels_ext_npu/selftest"),
}


@cache
def definitions() -> tuple[tuple[str, int, str], ...]:
    """Return what is defined: file, line and name of classes, functions, parameters and variables, and of files."""
    paths = {path.resolve() for place in PLACES for path in ROOT.glob(place)}  # common/ is linked into packages
    return tuple(
        (str(path.relative_to(ROOT)), *found) for path in sorted(paths) for found in ((1, path.stem), *defined_in(path))
    )


def defined_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def words(name: str) -> set[str]:
    """Return the words of a name in the singular."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return {word.removesuffix("s") for word in apart}


def test_no_definition_is_called_after_a_preposition() -> None:
    found = [f"{file}:{line} {name}" for file, line, name in definitions()]
    assert not [each for each in found if re.search("^_*of(_|$)|_of_*$", each.partition(" ")[2].lower())]


@pytest.mark.parametrize("word", ROOMS)
def test_a_word_names_one_thing(word: str) -> None:
    found = [
        f"{file}:{line} {name}"
        for file, line, name in definitions()
        if word in words(name) and not any(file == room or file.startswith(f"{room}/") for room in ROOMS[word])
    ]
    assert not found, f"{word!r} means something else there:\n" + "\n".join(found)
