"""The variants of the kernel repositories: those that the tree of a clone holds, and those that it leaves out.

All variants of a repository hold the same files. In a clone ``torch-universal`` links to the source, and the others
that are there link to it. What is published, bundled, installed or proven holds all of them, as files.

The digest in ``metadata.json`` covers every other file of a variant. Its id covers ``metadata.json`` itself, so that a
change of any byte shows. It becomes the name of the loaded module, which is one for variants that are the same.

The build of the wheel imports this where nothing but the standard library is installed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

METADATA = "metadata.json"
UNIVERSAL = "torch-universal"
NOARCH = ("torch-npu", UNIVERSAL)
_LIST = "variants.toml"


def repositories(root: Path) -> list[Path]:
    """Return the folders of the kernel repositories in a clone, in the order of their names."""
    return sorted(path.parent for path in root.glob("*/build.toml"))


def names(root: Path) -> tuple[str, ...]:
    """Return the names of all variants that a repository of the clone has, whether its tree holds them or not."""
    return *NOARCH, *tomllib.loads((root / _LIST).read_text())


def identity(metadata: dict[str, Any]) -> str:
    """Return the id that belongs to the metadata of a variant; one that is there already does not count."""
    rest = {key: value for key, value in metadata.items() if key != "id"}
    content = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return f"_{str(metadata.get('name', '')).replace('-', '_')}_v{metadata.get('version')}_{content[:12]}"


def render(metadata: dict[str, Any]) -> bytes:
    """Return metadata as the bytes of ``metadata.json``: it is written down in this one way."""
    return (json.dumps(metadata, indent=2) + "\n").encode()


def all_variants(repository: Path) -> dict[str, bytes]:
    """Return the files of all variants of a repository: path below ``<repository>/build`` -> content.

    Those that the tree of a clone leaves out are ``torch-universal`` under their names. Where no list of variants lies
    beside the repository, as in the installed package, none is left out.

    Raises:
        ValueError: ``torch-universal`` has no metadata, so that there is nothing to make the others from.
    """
    build, source = repository / "build", repository / "build" / UNIVERSAL
    folders = {path.name: path for path in sorted(build.glob("*")) if any(published_files(path))}
    if (repository.parent / _LIST).is_file():
        if not (source / METADATA).is_file():
            raise ValueError(f"{source / METADATA} is not there: make build")
        folders = dict.fromkeys(names(repository.parent), source) | folders
    read = {folder: contents(folder) for folder in set(folders.values())}
    return {f"{name}/{path}": content for name, folder in folders.items() for path, content in read[folder].items()}


def write(files: dict[str, bytes], folder: Path) -> None:
    """Write files by their paths in a folder, which is made."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


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
