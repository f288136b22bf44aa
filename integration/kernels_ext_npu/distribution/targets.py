"""What a path may be that is to be verified: a clone, a kernel repository, a build, a variant, or a cache."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Target:
    """A kernel repository on disk, or one variant of it alone."""

    name: str
    folder: Path
    cached: bool = False

    def verify(self) -> list[Verified]:
        """Verify its variants; what a cache has besides them counts as one more."""
        if (self.folder / METADATA).exists():
            return [verify_variant(self.folder.resolve())]
        build = self.folder / "build" if (self.folder / "build").is_dir() else self.folder
        found = verify_build(build) if build != self.folder or not self.cached else []
        if self.cached:
            found.append(
                Verified("(cache)", self.folder, len(_links(self.folder)), problems=blob_problems(self.folder))
            )
        return found


def find(path: Path) -> list[Target]:
    """Find the kernel repositories at a path."""
    path = path.resolve()
    if (path / METADATA).exists() or _is_build(path):
        return [Target(_display(path), path)]
    if _is_build(path / "build"):
        return [Target(path.name, path)]
    snapshots = _snapshots(path)
    if snapshots:
        return snapshots
    clone = [Target(child.name, child) for child in sorted(path.iterdir()) if _is_build(child / "build")]
    if not clone:
        raise RefusedError(
            f"{path} holds no variants of a kernel: expected is a clone of the project, a kernel repository, its build "
            "folder, one variant, or a cache with folders such as kernels--kernels-ext-npu--RMSNorm"
        )
    return clone


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
    (target,) = find(cache / f"kernels--{repo_id.replace('/', '--')}" / "snapshots" / commit)
    return commit, target.verify()


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


def _snapshots(path: Path) -> list[Target]:
    """Find the snapshots of a cache, of a repository in it, or the one that a path is."""
    if path.parent.name == "snapshots" and (match := CACHED.fullmatch(path.parent.parent.name)):
        return [Target(f"{match[1]}/{match[2]} at {path.name[:12]}", path, cached=True)]
    if CACHED.fullmatch(path.name) and (path / "snapshots").is_dir():
        return [target for snapshot in sorted((path / "snapshots").iterdir()) for target in _snapshots(snapshot)]
    if path.name != "hub" and (path / "hub").is_dir():  # HF_HOME
        return _snapshots(path / "hub")
    return [target for child in sorted(path.glob("kernels--*")) for target in _snapshots(child)]


def _is_build(path: Path) -> bool:
    return path.is_dir() and any((child / METADATA).exists() for child in path.iterdir())


def _display(path: Path) -> str:
    repository = path.parent.parent if (path / METADATA).exists() and path.parent.name == "build" else path.parent
    return repository.name if path.name == "build" else f"{repository.name}/{path.name}"
