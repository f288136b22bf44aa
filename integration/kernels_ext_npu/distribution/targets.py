"""Find the builds to verify under a path: a clone, a kernel repository, a build folder, a variant, or a cache."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.sha import git_hash

from kernels_ext_npu.distribution import kernels_internals, published
from kernels_ext_npu.distribution.variants import METADATA
from kernels_ext_npu.distribution.verification import Verified, verify_build, verify_variant
from kernels_ext_npu.environment import RefusedError

CACHED = re.compile(r"(?:kernels|models)--(.+)--(.+)")


def verify_at(path: Path) -> dict[str, list[Verified]]:
    """Verify the kernel repositories at a path, or one variant alone; returns what was found, by their names.

    What a cache has of a repository besides its variants counts as one more.
    """
    path = Path(os.path.abspath(path))  # not resolved: a variant that is a link keeps its name
    if (path / METADATA).exists():
        return {_display(path): [verify_variant(path)]}
    if _is_build(path):
        return {_display(path): verify_build(path)}
    if _is_build(path / "build"):
        return {path.name: verify_build(path / "build")}
    if snapshots := _snapshots(path):
        return {name: _verify_snapshot(snapshot) for name, snapshot in snapshots.items()}
    clone = {child.name: child / "build" for child in sorted(path.iterdir()) if _is_build(child / "build")}
    if not clone:
        raise RefusedError(
            f"{path} holds no variants of a kernel: expected is a clone of the project, a kernel repository, its build "
            "folder, one variant, or a cache with folders such as kernels--kernels-ext-npu--RMSNorm"
        )
    return {name: verify_build(build) for name, build in clone.items()}


def verify_published(repo_id: str, version: int) -> tuple[str, list[Verified]]:
    """Download a version from the Hub, and verify it; returns its commit, and what was found.

    Raises:
        LookupError: there is no such version, or no variant in it.
        Exception: one of `published.FAILURES` where the Hub cannot be asked.
    """
    api = HfApi()
    with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-") as folder:
        try:
            commit = published.head(api, repo_id, version)
            snapshot, differences = published.download(api, repo_id, commit, Path(folder))
        except httpx2.TransportError as error:
            raise ConnectionError(
                f"{api.endpoint} cannot be asked: {error}. Without internet set HF_HUB_OFFLINE=1, which looks into the "
                "cache, or give a path."
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status < 500:
                raise
            raise ConnectionError(f"{api.endpoint} answers {status}: it is overloaded or down. Try again.") from error
        if not (snapshot / "build").is_dir():
            raise LookupError(f"{repo_id} has no variants on v{version}")
        found = verify_build(snapshot / "build")
        for entry in found:
            if entry.version not in (None, version):
                entry.problems.append(f"{METADATA}: says version {entry.version} on the branch v{version}")
        files = sum(path.is_file() for path in snapshot.rglob("*"))
        found.append(Verified("(download)", snapshot, files, problems=differences))
    return commit, found


def verify_cached(repo_id: str, version: int) -> tuple[str, list[Verified]]:
    """Verify what `kernels` would load without a network; returns its commit, and what was found."""
    commit = published.cached_commit(repo_id, version)
    chosen = kernels_internals.find("kernels.hf_hub.CACHE_DIR", os.environ.get("KERNELS_CACHE"))
    cache = Path(chosen or constants.HF_HUB_CACHE)
    (found,) = verify_at(cache / f"kernels--{repo_id.replace('/', '--')}" / "snapshots" / commit).values()
    return commit, found


def blob_problems(snapshot: Path) -> list[str]:
    """List how a cached snapshot differs from what was downloaded: a blob is named by the hash of its content."""
    problems = []
    for link in _links(snapshot):
        name = link.relative_to(snapshot)
        try:
            blob = link.resolve(strict=True)
        except OSError:
            problems.append(f"{name}: missing in the cache, its link leads nowhere")
            continue
        content = blob.read_bytes()
        expected = git_hash(content) if len(blob.name) == 40 else hashlib.sha256(content).hexdigest()
        if blob.name != expected:
            problems.append(f"{name}: changed since it was downloaded")
    return problems


def _links(snapshot: Path) -> list[Path]:
    return sorted(path for path in snapshot.rglob("*") if path.is_symlink())


def _verify_snapshot(snapshot: Path) -> list[Verified]:
    found = verify_build(snapshot / "build") if (snapshot / "build").is_dir() else []
    return [*found, Verified("(cache)", snapshot, len(_links(snapshot)), problems=blob_problems(snapshot))]


def _snapshots(path: Path) -> dict[str, Path]:
    """Find the snapshots of a cache, of a repository in it, or the one that a path is, by their names."""
    if path.parent.name == "snapshots" and (match := CACHED.fullmatch(path.parent.parent.name)):
        return {f"{match[1]}/{match[2]} at {path.name[:12]}": path}
    if CACHED.fullmatch(path.name) and (path / "snapshots").is_dir():
        folders = sorted((path / "snapshots").iterdir())
    elif path.name != "hub" and (path / "hub").is_dir():  # HF_HOME
        folders = [path / "hub"]
    else:
        folders = sorted(path.glob("kernels--*"))
    return {name: found for folder in folders for name, found in _snapshots(folder).items()}


def _is_build(path: Path) -> bool:
    return path.is_dir() and any((child / METADATA).exists() for child in path.iterdir())


def _display(path: Path) -> str:
    repository = path.parent.parent if (path / METADATA).exists() and path.parent.name == "build" else path.parent
    return repository.name if path.name == "build" else f"{repository.name}/{path.name}"
