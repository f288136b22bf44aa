"""Puts kernel repositories into the Hub's cache, as `kernels` looks for them there without a network.

Offline, version 1 is the commit in ``refs/v1``, whose files are all of ``snapshots/<commit>``.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kernels_ext_npu.distribution.bundle_archive import BundleError, KernelRepository
from kernels_ext_npu.distribution.variants import is_bytecode
from kernels_ext_npu.sources import ORGANISATION


@dataclass(frozen=True)
class Place:
    """The place of a repository in the cache, and the commit that its version meant before."""

    repository: KernelRepository
    snapshot: Path
    ref: Path
    before: str | None


def folder() -> Path:
    """Return the cache that `kernels` reads in this environment.

    Raises:
        BundleError: it would look for the version in one folder and for the files in another.
    """
    from huggingface_hub import constants

    chosen = os.environ.get("KERNELS_CACHE")
    if chosen is None:
        return Path(constants.HF_HUB_CACHE).absolute()
    if not chosen or chosen.startswith("~"):
        raise BundleError(
            f"KERNELS_CACHE is {chosen!r}: kernels would look for a version in one folder, for its files in another. "
            "Unset it, or give the whole path of a folder."
        )
    return Path(chosen).absolute()


def install(repositories: list[KernelRepository], cache: Path) -> list[Place]:
    """Let each version mean the given repository: all of them or, if anything fails, none.

    Nothing else that the cache holds changes, other snapshots of the same repositories included. A process that is
    killed leaves every repository with its old or its new version, and the next installation completes it.

    Raises:
        BundleError: the cache holds something that differs under the same commit, or hides what would be installed.
        OSError: a file cannot be written.
    """
    places = [_place(repository, cache) for repository in repositories]
    problems = [problem for place in places for problem in (*_differences(place), *_hidden(place, cache))]
    if problems:
        raise BundleError("\n".join(problems))
    with ExitStack() as always, ExitStack() as undo:
        staged = []
        for place in places:
            staging = place.ref.parent.parent / f".bundle-{uuid.uuid4().hex}"
            staged.append((place, staging))
            always.callback(shutil.rmtree, staging, ignore_errors=True)
            _stage(place, staging)
        for place, staging in staged:
            _merge(staging / "snapshot", place.snapshot)
        for place, staging in staged:
            if place.before is None:
                undo.callback(place.ref.unlink, missing_ok=True)
            else:
                undo.callback(os.replace, staging / "before", place.ref)
            os.replace(staging / "ref", place.ref)
        undo.pop_all()
    return places


def _place(repository: KernelRepository, cache: Path) -> Place:
    home = cache / _folder_name(repository, "kernel")
    ref = home / "refs" / f"v{repository.version}"
    before = ref.read_text().strip() if ref.is_file() else None
    return Place(repository, home / "snapshots" / repository.commit, ref, before)


def _folder_name(repository: KernelRepository, kind: str) -> str:
    from huggingface_hub.file_download import repo_folder_name

    return repo_folder_name(repo_id=f"{ORGANISATION}/{repository.name}", repo_type=kind)


def _differences(place: Place) -> Iterator[str]:
    """Find files under the same commit that are not those of the repository; some or all may be missing."""
    for path in sorted(place.snapshot.rglob("*")):
        name = path.relative_to(place.snapshot).as_posix()
        if path.is_file() and not is_bytecode(Path(name)):
            expected = place.repository.files.get(name)
            if expected is None or path.read_bytes() != expected:
                what = "is not in the bundle" if expected is None else "differs from the one in the bundle"
                yield f"{path} {what}, and belongs to the same commit: remove {place.snapshot} and install again"


def _hidden(place: Place, cache: Path) -> Iterator[str]:
    """Find what an old release has left in the cache as a model, which `kernels` prefers."""
    ref = cache / _folder_name(place.repository, "model") / "refs" / place.ref.name
    if ref.is_file() and ref.read_text().strip() != place.repository.commit:
        yield f"{ref} would be taken in place of what is installed: remove {ref.parent.parent}, left by an old kernels"


def _stage(place: Place, staging: Path) -> None:
    """Write everything beside its place, where nobody looks."""
    for path, content in place.repository.files.items():
        _write(staging / "snapshot" / path, content)
    _write(staging / "ref", place.repository.commit.encode())
    if place.before is not None:
        _write(staging / "before", place.before.encode())
    for parent in (place.snapshot.parent, place.ref.parent):
        parent.mkdir(exist_ok=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a rename may survive a power cut that the content of its file does not


def _merge(source: Path, target: Path) -> None:
    """Move what is missing at the target there: a folder at once where there is none."""
    if source.is_file():
        if not target.is_file():
            os.replace(source, target)
        return
    try:
        os.rename(source, target)
    except OSError:
        if not target.is_dir():
            raise
        for child in sorted(source.iterdir()):
            _merge(child, target / child.name)
