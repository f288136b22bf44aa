"""Bundles: all kernel repositories in one file, to carry them to where there is no internet, into the Hub's cache.

`kernels` looks for them there without a network: version 1 is the commit in ``refs/v1``, whose files are all of
``snapshots/<commit>``.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kernels_ext_npu import catalogue
from kernels_ext_npu.distribution import bundle_archive, sources
from kernels_ext_npu.distribution.bundle_archive import BundleError, KernelRepository, refuse
from kernels_ext_npu.distribution.sources import ORGANISATION
from kernels_ext_npu.distribution.variants import contents, is_bytecode, left_out
from kernels_ext_npu.distribution.verification import verify_build
from kernels_ext_npu.environment import first_line


def write(output: Path, source: str | Path = "bundled") -> list[KernelRepository]:
    """Make the bundle of a source; the same content gives the same bytes.

    Args:
        source: "bundled" for the copies in this package, "hub" for what is published, or the path of a clone.

    Raises:
        BundleError: the source holds no kernels, or others than their metadata says, or the file cannot be written.
    """
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BundleError(f"{output} is a folder, or lies in one that does not exist")
    if source == "hub":
        repositories = [_from_hub(name) for name in catalogue.REPOSITORIES]
    else:
        try:
            sources.check(source, set(catalogue.REPOSITORIES))
        except FileNotFoundError as error:
            raise BundleError(str(error)) from error
        repositories = [_from_folder(sources.root(source) / name) for name in catalogue.REPOSITORIES]
    refuse(_problems(repositories))
    content = bundle_archive.pack(repositories)
    try:
        _write(output, content, output.absolute().parent)
    except OSError as error:
        raise BundleError(f"{output} cannot be written: {error.strerror}") from error
    return repositories


def install(archive: Path) -> list[Place]:
    """Check a bundle, and put its repositories into the cache that `kernels` reads.

    Raises:
        BundleError: the bundle is damaged, unsafe or not for this release, or the cache holds something that differs
            or cannot be written.
    """
    cache = cache_folder()
    repositories = bundle_archive.unpack(archive)
    refuse([f"{archive}: {problem}" for problem in _problems(repositories)])
    try:
        return put_into_cache(repositories, cache)
    except OSError as error:
        raise BundleError(
            f"{cache} cannot be written: {error.strerror}. Set HF_HOME to a folder that you may write to, here and "
            "where the kernels are loaded."
        ) from error


def _problems(repositories: list[KernelRepository]) -> list[str]:
    """List what keeps these repositories from being those of this release, whole and intact."""
    names = [repository.name for repository in repositories]
    if set(names) != set(catalogue.REPOSITORIES):
        return [f"it holds {', '.join(names) or 'nothing'}, and this release needs {', '.join(catalogue.REPOSITORIES)}"]
    problems = []
    for repository in repositories:
        if repository.version != sources.VERSION:
            problems.append(f"{repository.name} has version {repository.version}, not {sources.VERSION}")
        with tempfile.TemporaryDirectory() as folder:
            for path, content in repository.files.items():
                if path.startswith("build/"):
                    (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(folder) / path).write_bytes(content)
            if not (Path(folder) / "build").is_dir():
                problems.append(f"{repository.name} holds no variants")
                continue
            for variant in verify_build(Path(folder) / "build"):
                where = f"{repository.name}/build/{variant.variant}"
                problems += [f"{where}: {problem}" for problem in variant.problems]
                if variant.version not in (None, repository.version):
                    problems.append(f"{where}: its version is {variant.version}, not {repository.version}")
    return problems


def _from_folder(folder: Path) -> KernelRepository:
    """Return the variants in the package or of a clone, which are all that the branch of a version needs."""
    for path in sorted((folder / "build").rglob("*")):
        if path.is_symlink():
            raise BundleError(f"{path} is a link, and a variant holds only files")
    try:
        found = contents(folder / "build") | left_out(folder)
    except ValueError as error:
        raise BundleError(str(error)) from error
    files = {f"build/{path}": content for path, content in found.items()}
    return KernelRepository(folder.name, sources.VERSION, files)


def _from_hub(name: str) -> KernelRepository:
    """Download all that the branch of the version holds: a cache may have been changed."""
    from huggingface_hub import HfApi

    from kernels_ext_npu.distribution import published

    api, repo_id = HfApi(), f"{ORGANISATION}/{name}"
    try:
        commit = published.head(api, repo_id, sources.VERSION)
        with tempfile.TemporaryDirectory() as cache:
            folder, problems = published.download(api, repo_id, commit, Path(cache))
            files = contents(folder)
    except Exception as error:  # whatever the Hub's client makes of a missing repository or network
        raise BundleError(f"{repo_id} cannot be downloaded from {api.endpoint}: {first_line(error)}") from error
    refuse([f"{repo_id}: {problem}" for problem in problems])
    return KernelRepository(name, sources.VERSION, files, commit)


@dataclass(frozen=True)
class Place:
    """The place of a repository in the cache, and the commit that its version meant before."""

    repository: KernelRepository
    home: Path
    snapshot: Path
    ref: Path
    before: str | None


def cache_folder() -> Path:
    """Return the cache that `kernels` reads in this environment; refuse two, one for versions and one for files."""
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


def put_into_cache(repositories: list[KernelRepository], cache: Path) -> list[Place]:
    """Let each version mean the given repository: all of them or, if anything fails, none.

    Nothing else that the cache holds changes, other snapshots of the same repositories included. No version means the
    new files before all are there. A process that is killed leaves every repository with its old or its new version,
    and the next installation completes what one has left.

    Raises:
        BundleError: the cache holds something that differs under the same commit, or hides what would be installed.
        OSError: a file cannot be written.
    """
    places = [_place(repository, cache) for repository in repositories]
    refuse([problem for place in places for problem in (*_differences(place), *_hidden(place, cache))])
    for place in places:
        for path, content in place.repository.files.items():
            if not (place.snapshot / path).is_file():
                _write(place.snapshot / path, content, place.home)
    with ExitStack() as undo:
        for place in places:
            if place.before is None:
                undo.callback(place.ref.unlink, missing_ok=True)
            else:
                undo.callback(_write, place.ref, place.before.encode(), place.home)
            _write(place.ref, place.repository.commit.encode(), place.home)
        undo.pop_all()
    return places


def _place(repository: KernelRepository, cache: Path) -> Place:
    home = cache / f"kernels--{ORGANISATION}--{repository.name}"
    ref = home / "refs" / f"v{repository.version}"
    before = ref.read_text().strip() if ref.is_file() else None
    return Place(repository, home, home / "snapshots" / repository.commit, ref, before)


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
    ref = cache / f"models--{ORGANISATION}--{place.repository.name}" / "refs" / place.ref.name
    if ref.is_file() and ref.read_text().strip() != place.repository.commit:
        yield f"{ref} would be taken in place of what is installed: remove {ref.parent.parent}, left by an old kernels"


def _write(path: Path, content: bytes, beside: Path) -> None:
    """Write a file whole or not at all: first into a folder where nobody looks for it, then in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside / f".bundle-{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a rename may survive a power cut that the content of its file does not
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
