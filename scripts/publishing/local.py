"""Read a kernel repository of a clone, as it is to be published."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels_ext_npu.distribution.variants import all_variants, repositories
from publishing.remote import RefusedError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
CARD = "README.md"


class NoRepositoryError(ValueError):
    """Say that there is no kernel repository of that name. The message lists those that there are."""


@dataclass(frozen=True)
class Local:
    """A kernel repository, and the variants of it that were chosen.

    Attributes:
        built: all its variants: path below ``build`` -> content.
    """

    folder: Path
    general: dict[str, Any]
    variants: tuple[str, ...]
    built: dict[str, bytes]

    @property
    def repo_id(self) -> str | None:
        return self.general.get("hub", {}).get("repo-id")

    def files(self) -> dict[str, bytes]:
        """Return what the branch of the version gets: path in the repository -> content."""
        return {f"build/{path}": content for path, content in self.built.items() if _variant(path) in self.variants}

    def card(self) -> dict[str, bytes]:
        """Return what the branch main gets."""
        return {CARD: (self.folder / CARD).read_bytes()}


def find(repository: str, chosen: tuple[str, ...] = (), pruned: tuple[str, ...] = ()) -> Local:
    """Return the kernel repository at a path, or of a name in this clone.

    Args:
        chosen: its variants, by default all but the pruned.

    Raises:
        NoRepositoryError: there is none.
        RefusedError: it was not built.
    """
    folder = next((path for path in (Path(repository), ROOT / repository) if (path / "build.toml").is_file()), None)
    if folder is None:
        known = ", ".join(path.name for path in repositories(ROOT))
        raise NoRepositoryError(f"no kernel repository called {repository}; there are {known}, or give a path to one")
    try:
        built = all_variants(folder)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    general = tomllib.loads((folder / "build.toml").read_text()).get("general", {})
    there = {_variant(path) for path in built}
    return Local(folder.resolve(), general, chosen or tuple(sorted(there - set(pruned))), built)


def _variant(path: str) -> str:
    return path.partition("/")[0]
