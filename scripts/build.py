"""Build the variants in the tree of the kernel repositories: ``python scripts/build.py [RMSNorm ...] [--check]``.

A variant holds the source of ``<Repository>/torch-ext``, a shim for loaders that look for a package named like the
repository, and its ``metadata.json``. In the tree ``torch-universal`` holds links to the source, and the others are
links to it; what is published or packed is files: kernels_ext_npu/distribution/variants.py.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kernels_ext_npu.distribution import variants
from kernels_ext_npu.distribution.variants import METADATA, NOARCH, UNIVERSAL, identity, names, repositories

ROOT = Path(__file__).resolve().parent.parent
COMMON = "_common"  # in each package, a link to the folder of that name at the root
# of the strict variants the tree holds those for this CANN
_CANN_IN_TREE = "-cann82-"

SHIM = '''"""For loaders that expect a package named like the repository: the same module under that name."""

import importlib.util
import sys
from pathlib import Path

_variant = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location(
    __name__, _variant / "__init__.py", submodule_search_locations=[str(_variant)]
)
_module = importlib.util.module_from_spec(_spec)
sys.modules[__name__] = _module
_spec.loader.exec_module(_module)
globals().update(vars(_module))
'''


def in_tree(root: Path = ROOT) -> tuple[str, ...]:
    """Return the names of the variants that the tree of a clone holds."""
    return tuple(name for name in names(root) if name in NOARCH or _CANN_IN_TREE in name)


def render(repository: Path, variants: Iterable[str]) -> dict[str, bytes]:
    """Return what the source of a repository gives: path below ``build``, which begins with a variant -> content."""
    package, general = _package(repository)
    source = {path: (package / path).read_bytes() for path in sources(package)}
    source[f"{repository.name}/__init__.py"] = SHIM.encode()
    files = source | {METADATA: _metadata(general, source)}
    return {f"{name}/{path}": content for name in variants for path, content in files.items()}


def tree(repository: Path, root: Path = ROOT) -> dict[str, bytes | str]:
    """Return what lies below ``<repository>/build`` in the tree: path -> content, or where it links to."""
    package, _ = _package(repository)
    folder = repository.resolve() / "build" / UNIVERSAL
    linked = {
        f"{UNIVERSAL}/{path}": os.path.relpath((package / path).resolve(), (folder / path).parent)
        for path in sources(package)
    }
    others = {name: UNIVERSAL for name in in_tree(root) if name != UNIVERSAL}
    return render(repository, [UNIVERSAL]) | linked | others


def _package(repository: Path) -> tuple[Path, dict]:
    general = tomllib.loads((repository / "build.toml").read_text())["general"]
    return repository / "torch-ext" / general["name"].replace("-", "_"), general


def sources(package: Path) -> list[str]:
    """Return the files of a package by their paths in it: its own, and the common ones that these import."""
    own = sorted(path.relative_to(package) for path in package.rglob("*.py") if COMMON not in path.parts)
    needed, waiting = {"__init__"}, [name for path in own for name in common_imports(package / path)]
    for name in waiting:  # grows while it runs
        if name not in needed:
            needed.add(name)
            waiting += common_imports(package / COMMON / f"{name}.py")
    return [*map(str, own), *(f"{COMMON}/{name}.py" for name in sorted(needed) if len(needed) > 1)]


def common_imports(path: Path) -> list[str]:
    """Return the names of the common modules that a file of a package imports, or a common file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            named = f"{COMMON}." * (path.parent.name == COMMON) + (node.module or "")
            folder, _, module = named.partition(".")
            if folder == COMMON:
                found += [module] if module else [alias.name for alias in node.names]
    return found


def differences(repository: Path, root: Path = ROOT) -> list[str]:
    """Return how the build in the tree differs from what the source gives, a line a file; none where it is fresh."""
    expected, found = tree(repository, root), _found(repository / "build")
    missing = [f"missing: {path}" for path in expected.keys() - found.keys()]
    extra = [f"not built from the source: {path}" for path in found.keys() - expected.keys()]
    changed = [f"differs: {path}" for path in expected.keys() & found.keys() if expected[path] != found[path]]
    return sorted(missing + extra + changed)


def _found(build: Path) -> dict[str, bytes | str]:
    paths = {str(path.relative_to(build)): path for path in build.rglob("*") if "__pycache__" not in path.parts}
    links = {name: os.readlink(path) for name, path in paths.items() if path.is_symlink()}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()} | links


def build(repository: Path, root: Path = ROOT) -> None:
    """Replace ``<repository>/build`` by the variants that the tree holds, all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=repository) as folder:
        fresh = Path(folder) / "fresh"
        for path, content in tree(repository, root).items():
            target = fresh / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                target.symlink_to(content)
            else:
                target.write_bytes(content)
        if (repository / "build").exists():
            (repository / "build").rename(Path(folder) / "old")
        fresh.rename(repository / "build")


def _metadata(general: dict, source: dict[str, bytes]) -> bytes:
    metadata = {
        "name": general["name"],
        "id": "",  # at its place
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": "cann"},
        "digest": {
            "algorithm": "sha256",
            "files": {
                path: base64.b64encode(hashlib.sha256(content).digest()).decode()
                for path, content in sorted(source.items())
            },
        },
    }
    return variants.render(metadata | {"id": identity(metadata)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", nargs="*", help="kernel repositories to build, by default all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a build is stale")
    options = parser.parse_args(arguments)
    known = {path.name: path for path in repositories(ROOT)}
    unknown = [name for name in options.repository if name not in known]
    if unknown:
        parser.error(f"no kernel repository called {', '.join(unknown)}; there are {', '.join(known)}")
    stale = False
    for name in options.repository or known:
        if options.check:
            lines = differences(known[name])
            stale |= bool(lines)
            print("\n  ".join([f"{name}: {'stale, run python scripts/build.py' if lines else 'fresh'}", *lines]))
        else:
            build(known[name])
            print(f"{name}: built {', '.join(NOARCH)} and {len(in_tree()) - len(NOARCH)} strict variants")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
