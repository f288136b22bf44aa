"""What the Hub holds of a kernel repository: the commit of a version, its files, and whether a download is these."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

KERNEL = "kernel"
FAILURES = (httpx2.HTTPError, OSError)  # what its client raises where it cannot be asked, or refuses


class VersionNotFoundError(LookupError):
    """A repository has no branch for a version. The message names those that it has."""


@dataclass(frozen=True)
class Content:
    """The content of a file as the Hub names it.

    Attributes:
        algorithm: "git", or "sha256" where the file is stored as a large one.
        hash: the hash of the content, in hexadecimal digits.
        size: its size in bytes.
    """

    algorithm: str
    hash: str
    size: int

    def is_of(self, content: bytes) -> bool:
        """Tell whether these bytes are the content."""
        found = git_hash(content) if self.algorithm == "git" else hashlib.sha256(content).hexdigest()
        return found == self.hash


def head(api: HfApi, repo_id: str, version: int) -> str:
    """Return the commit that ``version=...`` means at the moment.

    Raises:
        VersionNotFoundError: the repository has no branch for it.
    """
    branches = api.list_repo_refs(repo_id, repo_type=KERNEL).branches
    for branch in branches:
        if branch.name == f"v{version}":
            return branch.target_commit
    found = ", ".join(sorted(branch.name for branch in branches if branch.name.startswith("v"))) or "none at all"
    raise VersionNotFoundError(f"{repo_id} has no version {version}, a branch v{version}; its versions: {found}")


def cached_commit(repo_id: str, version: int) -> str:
    """Return the commit that `kernels` takes for a version without a network; it raises where the cache names none."""
    from kernels._versions import resolve_version_spec_as_ref

    return resolve_version_spec_as_ref(repo_id, version, local_files_only=True).target_commit


def tree(api: HfApi, repo_id: str, revision: str) -> dict[str, Content]:
    """Return every file of a revision, by its path."""
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision, repo_type=KERNEL)
    return {entry.path: _content(entry) for entry in entries if isinstance(entry, RepoFile)}


def download(api: HfApi, repo_id: str, commit: str, cache: Path) -> Path:
    """Download all files of a commit into a cache that should be empty, and return the folder that holds them."""
    return Path(str(api.snapshot_download(repo_id, repo_type=KERNEL, revision=commit, cache_dir=cache)))


def differences(folder: Path, files: dict[str, Content]) -> list[str]:
    """Find how a downloaded folder differs from the files that the Hub names, a line a file."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    missing = [f"{path}: missing in the download" for path in files.keys() - found.keys()]
    extra = [f"{path}: not among the files of the commit" for path in found.keys() - files.keys()]
    changed = [
        f"{path}: differs from the file of the commit"
        for path in files.keys() & found.keys()
        if not files[path].is_of(found[path].read_bytes())
    ]
    return sorted(missing + extra + changed)


def refusal(repo_id: str, version: int) -> str | None:
    """Return why `kernels` does not load a repository without being asked to, and how it is asked to.

    The reason is in its own words; None if it loads the repository.
    """
    from kernels.hf_hub import _check_trust_remote_code

    try:
        _check_trust_remote_code(repo_id, local_files_only=False, trust_remote_code=False)
    except ValueError as error:
        return (
            f"{error}\nName the repository, and kernels loads it:\n"
            f'    get_kernel("{repo_id}", version={version}, trust_remote_code=["{repo_id}"])\n'
            'kernels_ext_npu.register(source="hub") names the repositories of kernels-ext-npu by itself.'
        )
    return None


def _content(entry: RepoFile) -> Content:
    if entry.lfs is not None:
        return Content("sha256", entry.lfs.sha256, entry.size)
    return Content("git", entry.blob_id, entry.size)
