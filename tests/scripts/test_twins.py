"""What several kernel repositories need: a file of its own lies in ``common``, anything less is the same word for word.

What is compared are the functions, classes and constants at the top of every file of every repository.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import build

# name -> why its definitions are not the same
DIFFERENT = {
    "GEGLU": "a gated unit with its gradient for an MLP's node in SwiGLU, a gate for experts in FusedMoE",
    "SWIGLU": "a gated unit with its gradient for an MLP's node in SwiGLU, a gate for experts in FusedMoE",
    "_check": "what is refused are the arguments of other functions",
    "_is_fused": "every operator has limits of its own",
    "_small": "rotated values are sums of two: RoPE draws them half as large",
    "_transformers": "what transformers computes in place of the kernel that is measured",
    "unfit": "a projection that has to be called in SwiGLU, a block whose experts have to be in FusedMoE",
}


COMMON = build.ROOT / "common"


def sources() -> list[Path]:
    """The files of all kernel repositories that are neither copies nor links, and those that are linked."""
    folders = [*build.repositories(build.ROOT), COMMON]
    found = [path for folder in folders for path in folder.rglob("*.py") if not path.is_symlink()]
    return sorted(path for path in found if "build" not in path.relative_to(build.ROOT).parts)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What stands at the top of a file, also below an if or a try there."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from statements([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines. ``_`` and ``__all__`` are no names of anything."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [] if node.name == "_" else [node.name]
    targets = getattr(node, "targets", [node.target] if isinstance(node, ast.AnnAssign) else [])
    found = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name.id for name in found if isinstance(name.ctx, ast.Store) and not name.id.startswith("__")]


def shared() -> dict[str, dict[str, str]]:
    """What stands in several repositories, by its name: file -> its text there, without comments."""
    found: defaultdict[str, defaultdict[str, str]] = defaultdict(lambda: defaultdict(str))
    for path in sources():
        for node in statements(ast.parse(path.read_text()).body):
            for name in defined(node):  # of a name with two definitions, below an if and its else, these are one text
                found[name][str(path.relative_to(build.ROOT))] += ast.unparse(node)
    return {name: files for name, files in found.items() if len({path.partition("/")[0] for path in files}) > 1}


def test_what_has_one_name_in_several_repositories_is_the_same() -> None:
    found = shared()
    assert {"_FUSED_DTYPES"} <= found.keys()
    differing = {name: list(files) for name, files in found.items() if len(set(files.values())) > 1}
    assert differing.keys() == DIFFERENT.keys(), f"make them the same, or say in DIFFERENT why not: {differing}"


def test_no_file_stands_twice() -> None:
    by_content = defaultdict(list)
    for path in sources():
        by_content[path.read_bytes()].append(path)
    assert [paths for paths in by_content.values() if len(paths) > 1] == []


def test_what_several_repositories_import_is_common() -> None:
    """Each has a link to the folder, and its variants hold those files that it imports."""
    importing: defaultdict[str, set[Path]] = defaultdict(set)
    for package in build.ROOT.glob("*/torch-ext/*"):
        assert (package / build.COMMON).resolve() == COMMON
        for name in build.sources(package):
            if name.startswith(build.COMMON):
                importing[Path(name).name].add(package)
    assert importing.keys() == {path.name for path in COMMON.glob("*.py")}
    assert [name for name, packages in importing.items() if len(packages) == 1] == []
