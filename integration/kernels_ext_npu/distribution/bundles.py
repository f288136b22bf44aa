"""Bundles: all kernel repositories in one file, to carry them to where there is no internet."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from pathlib import Path

from kernels_ext_npu import catalogue, sources
from kernels_ext_npu.distribution import bundle_archive, hub_cache
from kernels_ext_npu.distribution.bundle_archive import BundleError, KernelRepository
from kernels_ext_npu.distribution.variants import is_bytecode, left_out
from kernels_ext_npu.distribution.verification import verify_build


def write(output: Path, source: str | Path = "bundled") -> list[KernelRepository]:
    """Make the bundle of a source; the same content gives the same bytes.

    Args:
        source: "bundled" for the copies in this package, "hub" for what is published, or the path of a clone.

    Raises:
        BundleError: the source holds no kernels, or others than their metadata says.
        OSError: the file cannot be written.
    """
    if source == "hub":
        repositories = [_from_hub(name) for name in catalogue.REPOSITORIES]
    else:
        try:
            sources.check(source, set(catalogue.REPOSITORIES))
        except FileNotFoundError as error:
            raise BundleError(str(error)) from error
        repositories = [_from_folder(sources.root(source) / name) for name in catalogue.REPOSITORIES]
    _refuse(_problems(repositories))
    content = bundle_archive.pack(repositories)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BundleError(f"{output} is a folder, or lies in one that does not exist")
    temporary = output.with_name(f"{output.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return repositories


def install(archive: Path) -> list[hub_cache.Place]:
    """Check a bundle, and put its repositories into the cache that `kernels` reads.

    Raises:
        BundleError: the bundle is damaged, unsafe or not for this release, or the cache holds something that differs.
        OSError: a file cannot be written.
    """
    cache = hub_cache.folder()
    repositories = bundle_archive.unpack(archive)
    _refuse([f"{archive}: {problem}" for problem in _problems(repositories)])
    return hub_cache.install(repositories, cache)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise BundleError("\n".join(problems))


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
    files = {}
    for path in sorted((folder / "build").rglob("*")):
        if path.is_symlink():
            raise BundleError(f"{path} is a link, and a variant holds only files")
        if path.is_file() and not is_bytecode(path.relative_to(folder)):
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    try:
        files |= {f"build/{path}": content for path, content in left_out(folder).items()}
    except ValueError as error:
        raise BundleError(str(error)) from error
    return KernelRepository(folder.name, _version(files), files)


def _version(files: dict[str, bytes]) -> int:
    """Return the version that the first metadata says.

    Where others do not agree they are refused later, as is metadata without one.
    """
    for path, content in files.items():
        if path.endswith("/metadata.json"):
            try:
                return int(json.loads(content)["version"])
            except (KeyError, TypeError, ValueError):
                break
    return sources.VERSION


def _from_hub(name: str) -> KernelRepository:
    """Download all that the branch of the version holds: a cache may have been changed."""
    from huggingface_hub import HfApi

    from kernels_ext_npu.distribution import published

    api, repo_id = HfApi(), f"{sources.ORGANISATION}/{name}"
    try:
        commit = published.head(api, repo_id, sources.VERSION)
        with tempfile.TemporaryDirectory() as cache:
            folder = published.download(api, repo_id, commit, Path(cache))
            problems = published.differences(folder, published.tree(api, repo_id, commit))
            files = {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file() and not is_bytecode(path.relative_to(folder))
            }
    except Exception as error:  # whatever the Hub's client makes of a missing repository or network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BundleError(f"{repo_id} cannot be downloaded from {api.endpoint}: {reason}") from error
    _refuse([f"{repo_id}: {problem}" for problem in problems])
    return KernelRepository(name, sources.VERSION, files, commit)
