"""What several kernel repositories need: a file of its own lies in ``common``, anything less is the same word for word.

What is compared are the functions, classes and constants at the top of every file of every repository.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import build

# name -> why its definitions are not the same
DIFFERENT = {
    "GEGLU": "a gated unit with its gradient for an MLP's node in SwiGLU, a gate for experts in FusedMoE",
    "SWIGLU": "a gated unit with its gradient for an MLP's node in SwiGLU, a gate for experts in FusedMoE",
    "_check": "what is refused are the arguments of other functions",
    "_geglu_grad": "MLPs have GELU itself too, experts have its form with tanh",
    "_is_fused": "every operator has limits of its own",
    "_small": "rotated values are sums of two: RoPE draws them half as large",
    "_summed": "products by experts in FusedMoE, weighted tensors over the heads of a key in LinearAttention",
    "_transformers": "what transformers computes in place of the kernel that is measured",
    "unfit": "a projection that has to be called in SwiGLU, a block whose experts have to be in FusedMoE",
}


class Definition(NamedTuple):
    """Something that is defined at the top of a file of a kernel repository."""

    repository: str
    path: Path
    name: str
    node: ast.stmt


COMMON = build.ROOT / "common"


def sources() -> list[Path]:
    """The files of all kernel repositories that are neither copies nor links, and those that are linked."""
    folders = [*build.repositories(build.ROOT), COMMON]
    found = [path for folder in folders for path in folder.rglob("*.py") if not path.is_symlink()]
    return sorted(path for path in found if "build" not in path.relative_to(build.ROOT).parts)


def definitions() -> list[Definition]:
    """What is defined at the top of their files, also below an if or a try there."""
    return [
        Definition(path.relative_to(build.ROOT).parts[0], path.relative_to(build.ROOT), name, node)
        for path in sources()
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


def test_what_has_one_name_in_several_repositories_is_the_same() -> None:
    found = shared(definitions())
    assert {"_Layer", "_needs_grad", "immovable"} <= found.keys()
    by_name = {name: texts(all_of) for name, all_of in found.items()}
    differing = {name: list(files.values()) for name, files in by_name.items() if len(files) > 1}
    assert differing.keys() == DIFFERENT.keys(), f"make them the same, or say in DIFFERENT why not: {differing}"


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
