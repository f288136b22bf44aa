"""What the integration patches, reads or calls of other libraries beside their public interface is as it was read.

Where something is not, a run with these tests runs nothing else (`tests.support.names_first`).
"""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from kernels_ext_npu.transformers_internals import original_function

PACKAGE = Path(__file__).resolve().parents[2] / "integration" / "kernels_ext_npu"
TABLE = Path(__file__).resolve().parents[1] / "data" / "names_of_others.txt"
LIBRARIES = {"accelerate", "huggingface_hub", "kernels", "peft", "torch", "torch_npu", "transformers"}
PATCHES = {"attribute", "method", "object"}  # of Patches, and of unittest.mock.patch
STARRED = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
ROWS = [tuple(line.split(maxsplit=1)) for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
# a name; in brackets of one kind each what is taken in this order, held in closures, and read by name
ROW = re.compile(r"(?P<name>[\w.]+)(\((?P<taken>.*?)\))?(\{(?P<held>.*?)\})?(\[(?P<read>.*?)\])?")
# what a forward or an attention is given by name
MAPPINGS = {"batch", "batch_data", "inputs", "kwargs", "named", "options", "rest"}
FILES_OF_MODELS = (
    "binding/*.py",
    "decoding/*.py",
    "lifecycle/*.py",
    "swaps/*.py",
    "swaps/attention/*.py",
    "swaps/recognised/*.py",
)
OURS = {"output_attentions", "input"}  # a flag of configs that is handed on; the first argument of F.cross_entropy


def parsed(row: str) -> tuple[str, dict[str, list[str] | None]]:
    """A name, and what is in each of the brackets behind it; None for those that are not there."""
    found = ROW.fullmatch(row)
    assert found is not None, row
    texts = {kind: found[kind] for kind in ("taken", "held", "read")}
    return found["name"], {k: text if text is None else text.split(", ") * bool(text) for k, text in texts.items()}


@pytest.mark.parametrize(("file", "row"), ROWS, ids=[row for _, row in ROWS])
def test_what_is_relied_on_is_there(file: str, row: str) -> None:
    relies = f"and integration/kernels_ext_npu/{file} relies on it: mend that first, what else fails may fail for that"
    assert (PACKAGE / file).is_file(), f"{file} is no file of ours any more: whose is {row}?"
    name, brackets = parsed(row)
    try:
        value = pkgutil.resolve_name(name)
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{name} is gone ({error}), {relies}")
    if (listed := brackets["taken"]) is not None:
        found = inspect.signature(value).parameters
        has = f"{name}{inspect.signature(value)}"
        assert [each for each in found if each in listed] == listed, f"{has} has not {listed} in this order, {relies}"
        needed = {p.name for p in found.values() if p.default is p.empty and p.kind not in STARRED}
        assert needed <= set(listed), f"{has} wants more than {listed}, {relies}"
    if (held := brackets["held"]) is not None:
        missing = set(held) - set(_free(value.__code__))
        assert not missing, f"the functions in {name} hold no {sorted(missing)} any more, {relies}"
    if (read := brackets["read"]) is not None:
        missing = [each for each in read if each not in _named_in(value)]
        assert not missing, f"{name} has no {missing} any more, {relies}"


def test_every_name_that_is_read_of_what_models_hand_on_is_in_the_list() -> None:
    listed = {each for _, row in ROWS for names in parsed(row)[1].values() if names for each in names}
    paths = [path for part in FILES_OF_MODELS for path in PACKAGE.glob(part)]
    read = {name: path.name for path in paths for name in _names_read(path)}
    missing = {name: file for name, file in read.items() if name not in listed | OURS}
    assert not missing, f"list what has these names, in square brackets: {missing}"


def test_every_parameter_of_a_layer_that_takes_several_is_in_the_list() -> None:
    """Models may give each of them by name; what a layer takes alone is given without one."""
    listed = {each for _, row in ROWS for names in parsed(row)[1].values() if names for each in names}
    paths = PACKAGE.parents[1].glob("*/torch-ext/*/layers.py")
    taken = {name: path.parent.name for path in paths for name in _parameters_of_layers(path)}
    missing = {name: package for name, package in taken.items() if name not in listed}
    assert not missing, f"list what has these names, in square brackets: {missing}"


def test_the_list_is_complete() -> None:
    listed = {parsed(row)[0] for _, row in ROWS}
    found = {name: path for path in PACKAGE.rglob("*.py") for name in _names_of_others(path)}
    missing = {name: path for name, path in found.items() if not any(_is_known(name, known) for known in listed)}
    assert not missing, f"list these names of others, with the parameters that are passed: {missing}"


def _is_known(name: str, known: str) -> bool:
    """Tell whether a name is another, a part of it, or the beginning of it."""
    return f"{name}.".startswith(f"{known}.") or f"{known}.".startswith(f"{name}.")


def _free(code: CodeType) -> Iterator[str]:
    """Yield the names that the functions inside a function have in their closures."""
    yield from code.co_freevars
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _free(inner)


def _named_in(value: object) -> set[str]:
    """Return the fields of a class, or the parameters of a function and the words in it, such as names of arguments."""
    if isinstance(value, type):
        return set(value.__annotations__)
    function = inspect.unwrap(original_function(value) or value)
    words = [word for each in function.__code__.co_consts for word in (each if isinstance(each, tuple) else (each,))]
    return {*inspect.signature(function).parameters, *(word for word in words if isinstance(word, str))}


def _parameters_of_layers(path: Path) -> Iterator[str]:
    """Yield the names of what the forwards in a file take beside the layer, where they take more than one thing."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
            if len(names) > 2:
                yield from names[1:]


def _names_read(path: Path) -> Iterator[str]:
    """Yield the names that a file reads of what it is given by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Subscript(ast.Name(owner), ast.Constant(str(name))):
                pass
            case ast.Call(ast.Attribute(ast.Name(owner), "get" | "pop"), [ast.Constant(str(name)), *_]):
                pass
            case _:
                continue
        if owner in MAPPINGS:
            yield name


def _names_of_others(path: Path) -> Iterator[str]:
    """Yield the full names that a file patches, and those that it reads with an underscore in front somewhere."""
    tree, known, read = ast.parse(path.read_text()), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = [alias.name if alias.asname else alias.name.partition(".")[0] for alias in node.names]
            known |= {alias.asname or top: top for alias, top in zip(node.names, tops)}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            read += [f"{node.module}.{alias.name}" for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            read.append(_full(node, known))
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            owner = _full(node.args[0], known)
            if getattr(node.func, "attr", None) in PATCHES and owner.partition(".")[0] in LIBRARIES:
                yield f"{owner}.{node.args[1].value}"
    for name in read:
        library, *parts = name.split(".")
        if library in LIBRARIES and any(part.startswith("_") and not part.endswith("__") for part in parts):
            yield name


def _full(node: ast.expr, known: dict[str, str]) -> str:
    """Return the dotted name of an expression; empty where it does not begin with an import."""
    if isinstance(node, ast.Attribute):
        owner = _full(node.value, known)
        return owner and f"{owner}.{node.attr}"
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""
