"""Read a kernel repository of a clone, as it is to be published."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels_ext_npu.distribution.verification import published_files

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
    """Hold the folder of a kernel repository, and the variants in it that were chosen."""

    folder: Path
    general: dict[str, Any]
    variants: tuple[str, ...]

    @property
    def build(self) -> Path:
        return self.folder / "build"

    @property
    def repo_id(self) -> str | None:
        return self.general.get("hub", {}).get("repo-id")

    def files(self) -> dict[str, bytes]:
        """Return what the branch of the version gets: path in the repository -> content."""
        return {
            f"build/{variant}/{path.relative_to(self.build / variant).as_posix()}": path.read_bytes()
            for variant in self.variants
            for path in published_files(self.build / variant)
        }

    def card(self) -> dict[str, bytes]:
        """Return what the branch main gets."""
        return {CARD: (self.folder / CARD).read_bytes()}


def find(repository: str, chosen: tuple[str, ...] = (), pruned: tuple[str, ...] = ()) -> Local:
    """Find the kernel repository at a path or of a name here; its variants are those chosen, or all but the pruned."""
    folder = next((path for path in (Path(repository), ROOT / repository) if (path / "build.toml").is_file()), None)
    if folder is None:
        known = ", ".join(sorted(path.parent.name for path in ROOT.glob("*/build.toml")))
        raise NoRepositoryError(f"no kernel repository called {repository}; there are {known}, or give a path to one")
    build = folder / "build"
    there = sorted(path.name for path in build.iterdir() if path.name != "__pycache__") if build.is_dir() else []
    general = tomllib.loads((folder / "build.toml").read_text()).get("general", {})
    return Local(folder.resolve(), general, chosen or tuple(name for name in there if name not in pruned))
