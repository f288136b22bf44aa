"""The variants of the kernel repositories: those that the tree of a clone holds, and those that are made from them.

All variants of a repository hold the same files, each with a ``metadata.json`` of its own. The tree holds a few of
them. What is published, bundled, installed or proven holds all: the others are ``torch-npu`` under their names.

The digest in ``metadata.json`` covers every other file of a variant. Its id covers ``metadata.json`` itself, so that a
change of any byte shows, and becomes the name of the loaded module, where two equal ones would share submodules.

The build of the wheel imports this where nothing but the standard library is installed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

METADATA = "metadata.json"
NOARCH = ("torch-npu", "torch-universal")
_LIST = "variants.toml"


def repositories(root: Path) -> list[Path]:
    """Return the folders of the kernel repositories in a clone, in the order of their names."""
    return sorted(path.parent for path in root.glob("*/build.toml"))


def names(root: Path) -> tuple[str, ...]:
    """Return the names of all variants that a repository of the clone has, whether its tree holds them or not."""
    return *NOARCH, *tomllib.loads((root / _LIST).read_text())


def identity(metadata: dict[str, Any], variant: str) -> str:
    """Return the id that belongs to the metadata of a variant; one that is there already does not count."""
    rest = {key: value for key, value in metadata.items() if key != "id"}
    content = hashlib.sha256(json.dumps([variant, rest], sort_keys=True).encode()).hexdigest()
    name = str(metadata.get("name", "")).replace("-", "_")
    return f"_{name}_v{metadata.get('version')}_{variant.replace('-', '_')}_{content[:12]}"


def render(metadata: dict[str, Any]) -> bytes:
    """Return metadata as the bytes of ``metadata.json``: it is written down in this one way."""
    return (json.dumps(metadata, indent=2) + "\n").encode()


def renamed(files: dict[str, bytes], variant: str) -> dict[str, bytes]:
    """Return the files of a variant as those of another: the same, but for the id in their metadata."""
    metadata = json.loads(files[METADATA])
    metadata["id"] = identity(metadata, variant)
    return files | {METADATA: render(metadata)}


def left_out(repository: Path) -> dict[str, bytes]:
    """Return what the tree of a clone leaves out of ``<repository>/build``: path below it -> content.

    There is nothing where no list of variants lies beside the repository, as in the installed package, which has all.

    Raises:
        ValueError: ``torch-npu``, which the others are made from, is not there or has no metadata.
    """
    build = repository / "build"
    if not (repository.parent / _LIST).is_file():
        return {}
    # a folder may be left with the bytecode of a variant that the tree once held
    missing = [name for name in names(repository.parent) if not any(published_files(build / name))]
    source = build / NOARCH[0]
    files = contents(source)
    try:
        return {f"{name}/{path}": content for name in missing for path, content in renamed(files, name).items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{source / METADATA} is not there or cannot be read: make build") from error


def complete(repository: Path, build: Path) -> None:
    """Write ``<repository>/build`` to another folder, which must not exist, with what the tree leaves out of it."""
    shutil.copytree(repository / "build", build, symlinks=True)
    for path, content in left_out(repository).items():
        (build / path).parent.mkdir(parents=True, exist_ok=True)
        (build / path).write_bytes(content)


def published_files(variant: Path) -> Iterator[Path]:
    """Yield the files of a variant, without the bytecode that Python leaves beside them."""
    for path in sorted(variant.rglob("*")):
        if not (path.is_dir() and not path.is_symlink()) and not is_bytecode(path.relative_to(variant)):
            yield path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by their paths in it, without bytecode."""
    files = [path for path in published_files(folder) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def is_bytecode(path: Path) -> bool:
    """Tell whether `kernels` neither downloads a file nor counts it in a digest."""
    return "__pycache__" in path.parts or path.suffix == ".pyc"
