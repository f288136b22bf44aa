"""Look up a published kernel on the Hub: the commit of a version, its files, and whether a download matches them."""

from __future__ import annotations

import os
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants

from kernels_ext_npu.distribution.kernels_internals import need
from kernels_ext_npu.environment import RefusedError

KERNEL = "kernel"
FAILURES = (httpx2.HTTPError, OSError)  # what its client raises where it cannot be asked, or refuses


class VersionNotFoundError(LookupError):
    """A repository has no branch for a version. The message names those that it has."""


def head(api: HfApi, repo_id: str, version: int) -> str:
    """Return the commit that ``version=...`` means at the moment; raise VersionNotFoundError if it has no branch."""
    branches = api.list_repo_refs(repo_id, repo_type=KERNEL).branches
    for branch in branches:
        if branch.name == f"v{version}":
            return branch.target_commit
    found = ", ".join(sorted(branch.name for branch in branches if branch.name.startswith("v"))) or "none at all"
    raise VersionNotFoundError(f"{repo_id} has no version {version}, a branch v{version}; its versions: {found}")


def cache_folder() -> Path:
    """Return the cache that `kernels` reads in this environment; refuse two, one for versions and one for files."""
    chosen = os.environ.get("KERNELS_CACHE")
    if chosen is None:
        return Path(constants.HF_HUB_CACHE).absolute()
    if not chosen or chosen.startswith("~"):
        raise RefusedError(
            f"KERNELS_CACHE is {chosen!r}: kernels would look for a version in one folder, for its files in another. "
            "Unset it, or give the whole path of a folder."
        )
    return Path(chosen).absolute()


def cached_commit(repo_id: str, version: int) -> str:
    """Return the commit that `kernels` takes for a version without a network; it raises where the cache names none."""
    resolve = need("kernels._versions.resolve_version_spec_as_ref")
    return resolve(repo_id, version, local_files_only=True).target_commit


def download(api: HfApi, repo_id: str, commit: str, cache: Path) -> tuple[Path, list[str]]:
    """Download all files of a commit into a cache that should be empty.

    Returns:
        the folder that holds them, and how it differs from the files that the Hub names, a line a file.
    """
    folder = Path(str(api.snapshot_download(repo_id, repo_type=KERNEL, revision=commit, cache_dir=cache)))
    found = api.verify_repo_checksums(repo_id, repo_type=KERNEL, revision=commit, cache_dir=cache)
    missing = [f"{path}: missing in the download" for path in found.missing_paths]
    extra = [f"{path}: not among the files of the commit" for path in found.extra_paths]
    changed = [f"{entry['path']}: differs from the file of the commit" for entry in found.mismatches]
    return folder, sorted(missing + extra + changed)


def refusal(repo_id: str, version: int) -> str | None:
    """Return why `kernels` does not load a repository without being asked to, and how it is asked to.

    The reason is in its own words; None if it loads the repository.
    """
    check = need("kernels.hf_hub._check_trust_remote_code")
    try:
        check(repo_id, local_files_only=False, trust_remote_code=False)
    except ValueError as error:
        return (
            f"{error}\nName the repository, and kernels loads it:\n"
            f'    get_kernel("{repo_id}", version={version}, trust_remote_code=["{repo_id}"])\n'
            'kernels_ext_npu.register(source="hub") names the repositories of kernels-ext-npu by itself.'
        )
    return None
