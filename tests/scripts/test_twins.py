"""What several kernel repositories need: a file of its own lies in ``common``, anything less is the same word for word.

What is compared are the functions, classes and constants at the top of every file of every repository.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import build
import pytest

# name -> why its definitions are not the same
DIFFERENT = {
    "GEGLU": "a gated unit with its gradient for an MLP's node in SwiGLU, a gate for experts in FusedMoE",
    "SWIGLU": "a gated unit with its gradient for an MLP's node in SwiGLU, a gate for experts in FusedMoE",
    "_check": "what is refused are the arguments of other functions",
    "_geglu_grad": "MLPs have GELU itself too, experts have its form with tanh",
    "_is_fused": "every operator has limits of its own",
    "_small": "rotated values are sums of two: RoPE draws them half as large",
    "_transformers": "what transformers computes in place of the kernel that is measured",
    "unfit": "a projection that has to be called in SwiGLU, a block whose experts have to be in FusedMoE",
}
# names -> why one body has several
ALIKE = {
    frozenset({"Layer", "_Layer"}): "in RoPE several files share the class, so that it is private to none of them",
}


class Definition(NamedTuple):
    """Something that is defined at the top of a file of a kernel repository."""

    repository: str
    path: Path
    name: str
    node: ast.stmt


COMMON = build.ROOT / "common"


def sources(root: Path = build.ROOT) -> list[Path]:
    """The files of all kernel repositories that are neither copies nor links, and those that are linked."""
    folders = [*build.repositories(root), root / "common"]
    found = [path for folder in folders for path in folder.rglob("*.py") if not path.is_symlink()]
    return sorted(path for path in found if "build" not in path.relative_to(root).parts)


def definitions(root: Path = build.ROOT) -> list[Definition]:
    """What is defined at the top of their files, also below an if or a try there."""
    return [
        Definition(path.relative_to(root).parts[0], path.relative_to(root), name, node)
        for path in sources(root)
        for node, name in named(ast.parse(path.read_text()).body)
    ]


def named(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node, node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            yield from ((node, name.id) for name in names if is_stored(name))
        elif isinstance(node, (ast.If, ast.Try)):
            yield from named([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def shared(found: list[Definition]) -> dict[str, list[Definition]]:
    """What stands in several repositories, by its name. ``_`` and ``__all__`` are no names of anything."""
    by_name = defaultdict(list)
    for definition in found:
        if definition.name != "_" and not definition.name.startswith("__"):
            by_name[definition.name].append(definition)
    return {name: all_of for name, all_of in sorted(by_name.items()) if len({d.repository for d in all_of}) > 1}


def texts(found: list[Definition]) -> dict[str, list[str]]:
    """The text of each definition, with its docstrings and without comments, and the files that have it.

    Of a name with two definitions in one file, below an if and its else, these are one text.
    """
    by_file = defaultdict(list)
    for definition in found:
        by_file[str(definition.path)].append(ast.unparse(definition.node))
    by_text = defaultdict(list)
    for path, parts in by_file.items():
        by_text["\n".join(parts)].append(path)
    return dict(by_text)


def formula(node: ast.FunctionDef | ast.ClassDef) -> str:
    """What a function or class does, whatever it, its arguments and its variables are called."""
    tree = ast.parse(re.sub(rf"\b{node.name}\b", "_", ast.unparse(node)))
    for part in ast.walk(tree):
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    for function in [part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef)]:
        arguments = [part for part in ast.walk(function) if isinstance(part, ast.arg)]
        names = [part for part in ast.walk(function) if isinstance(part, ast.Name)]
        local = [argument.arg for argument in arguments] + [name.id for name in names if is_stored(name)]
        numbered = {name: f"_{number}" for number, name in enumerate(dict.fromkeys(local))}
        for argument in arguments:
            argument.arg, argument.annotation = numbered[argument.arg], None
        for name in names:
            name.id = numbered.get(name.id, name.id)
        function.returns = None
    return ast.unparse(tree)


def doubles(found: list[Definition]) -> dict[frozenset[str], list[str]]:
    """The functions and classes that do the same under several names, and their files."""
    by_formula = defaultdict(list)
    for definition in found:
        if isinstance(definition.node, (ast.FunctionDef, ast.ClassDef)):
            by_formula[formula(definition.node)].append(definition)
    return {
        frozenset(d.name for d in all_of): sorted(f"{d.path}: {d.name}" for d in all_of)
        for all_of in by_formula.values()
        if len({d.name for d in all_of}) > 1
    }


FOUND = definitions()
SHARED = shared(FOUND)


@pytest.mark.parametrize("name", SHARED)
def test_what_has_one_name_in_several_repositories_is_the_same(name: str) -> None:
    found = texts(SHARED[name])
    if name in DIFFERENT:
        assert len(found) > 1, f"{name} is the same everywhere: it needs no reason any more"
    else:
        assert len(found) == 1, f"{name} differs: {list(found.values())}. Make it the same, or say in DIFFERENT why not"


def test_what_does_the_same_has_one_name() -> None:
    unexplained = {names: files for names, files in doubles(FOUND).items() if names not in ALIKE}
    assert not unexplained, "give them one name, or say in ALIKE why not"


def test_every_reason_is_needed() -> None:
    assert set(DIFFERENT) <= set(SHARED)
    assert set(ALIKE) <= set(doubles(FOUND))


def test_the_helpers_that_are_known_to_stand_twice_are_found() -> None:
    assert {"_Layer", "_needs_grad", "immovable"} <= set(SHARED)


def test_no_file_stands_twice() -> None:
    by_content = defaultdict(list)
    for path in sources():
        by_content[path.read_bytes()].append(path)
    assert [paths for paths in by_content.values() if len(paths) > 1] == []


def test_a_repository_links_the_common_files_that_it_imports() -> None:
    """By their names; what several repositories do not import is not common."""
    linked = defaultdict(set)
    for package in build.ROOT.glob("*/torch-ext/*"):
        links = {path for path in package.iterdir() if path.is_symlink()}
        assert {path.resolve() for path in links} == {COMMON / path.name for path in links}
        assert {path.stem for path in links} <= imported(package)
        for path in links:
            linked[path.name].add(package)
    assert linked.keys() == {path.name for path in COMMON.glob("*.py")}
    assert [name for name, packages in linked.items() if len(packages) == 1] == []


def imported(package: Path) -> set[str]:
    """The modules of a package that its files import."""
    nodes = [node for path in package.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    relative = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    beside = {alias.name for node in relative if not node.module for alias in node.names}
    return beside | {node.module for node in relative if node.module}


@pytest.fixture
def two(tmp_path: Path):
    """Two kernel repositories of one file each, and what is found in them."""

    def write(first: str, second: str) -> list[Definition]:
        for name, text in (("A", first), ("B", second)):
            package = tmp_path / name / "torch-ext" / name.lower()
            package.mkdir(parents=True)
            (tmp_path / name / "build.toml").touch()
            (package / "part.py").write_text(text)
            (tmp_path / name / "build").mkdir()
            (tmp_path / name / "build" / "copy.py").write_text("def copy(): return 0\n")
        return definitions(tmp_path)

    return write


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("def f(x): return x + 1\n", "def f(x):  # a comment\n    return x + 1\n", True),
        ("def f(x): return x + 1\n", "def f(x): return x + 2\n", False),
        ("def f(x):\n    'One.'\n    return x\n", "def f(x):\n    'Another.'\n    return x\n", False),
        ("if 1:\n    f = 1\nelse:\n    f = 2\n", "if 1:\n    f = 1\nelse:\n    f = 2\n", True),
        ("if 1:\n    f = 1\nelse:\n    f = 2\n", "if 1:\n    f = 1\nelse:\n    f = 3\n", False),
        ("f: tuple = 1, 2\n", "f: tuple = 1, 3\n", False),
        ("class f:\n    def g(self): return 1\n", "class f:\n    def g(self): return 2\n", False),
    ],
)
def test_a_twin_that_drifts_is_seen(two, first: str, second: str, same: bool) -> None:
    found = shared(two(first, second))
    assert list(found) == ["f"]
    assert (len(texts(found["f"])) == 1) == same


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (
            "def f(x: int) -> int:\n    'One.'\n    y = x + 1\n    return y\n",
            "def g(a):\n    b = a + 1\n    return b\n",
            True,
        ),
        ("def f(x): return f(x) + 1\n", "def g(x): return g(x) + 1\n", True),
        ("def f(x, y): return x - y\n", "def g(x, y): return y - x\n", False),
        ("def f(x): return x.shape\n", "def g(x): return x.size\n", False),
        (
            "class F:\n    'One.'\n    def h(self, x): return F(x)\n",
            "class G:\n    def h(self, y): return G(y)\n",
            True,
        ),
    ],
)
def test_a_twin_under_another_name_is_seen(two, first: str, second: str, same: bool) -> None:
    assert bool(doubles(two(first, second))) == same
