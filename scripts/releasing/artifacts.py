"""Build the wheel and the source distribution of a commit, twice, and compare their bytes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from releasing import ReleaseError

VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
SECTION = re.compile(r"^## (\S+)", re.MULTILINE)


def version(root: Path) -> str:
    """Return the version that the package states, for which CHANGELOG.md has its newest section.

    Raises:
        ReleaseError: it has another one there.
    """
    (stated,) = VERSION.findall((root / "integration" / "kernels_ext_npu" / "__init__.py").read_text())
    sections = SECTION.findall((root / "CHANGELOG.md").read_text())
    if sections[:1] != [stated]:
        newest = sections[0] if sections else "missing"
        raise ReleaseError(
            f"the package says that it is {stated}, and the newest section of CHANGELOG.md is {newest}: write one that "
            f"begins with `## {stated}`, or change __version__ in integration/kernels_ext_npu/__init__.py"
        )
    return stated


def require_clean(root: Path) -> str:
    """Return the commit of a tree in which nothing is changed and nothing is untracked.

    Raises:
        ReleaseError: something is.
    """
    changed = _git(root, "status", "--porcelain").splitlines()
    if changed:
        raise ReleaseError(
            f"{len(changed)} files are changed or not in git, such as {changed[0][3:]}: commit or remove them, so that "
            "the release is what a commit says"
        )
    return _git(root, "rev-parse", "HEAD").strip()


def build(root: Path, commit: str, folder: Path) -> list[Path]:
    """Build the wheel and the source distribution of `commit` below `folder`, each twice in trees of their own.

    Returns:
        The two files of the first time: the source distribution, the wheel.

    Raises:
        ReleaseError: a build fails, or gives other bytes the second time.
    """
    first, second = (_build(root, commit, folder / name) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        if digest(one) != digest(other):
            raise ReleaseError(
                f"two builds of {one.name} from one commit differ ({digest(one)[:12]}, {digest(other)[:12]}): nobody "
                "could check that it was made from this source; look for times, paths and orders of sets in what "
                "scripts/hatch_build.py adds"
            )
    return first


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(root: Path, commit: str, folder: Path) -> list[Path]:
    tree = folder / "tree"
    tree.mkdir(parents=True)
    archive = folder / "tree.tar"
    _git(root, "archive", f"--output={archive}", commit)
    with tarfile.open(archive) as members:
        members.extractall(tree, filter="data")
    # the seed of hashes changes by itself: an order of a set that gets into a file is seen
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "SOURCE_DATE_EPOCH")}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder / "dist")]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise ReleaseError(f"hatchling cannot build it:\n{(result.stdout + result.stderr).strip()}")
    return sorted((folder / "dist").iterdir())


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if result.returncode:
        raise ReleaseError(f"git {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout
