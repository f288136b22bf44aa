"""Read again what is on the Hub: the tree, the content of every file, and the kernel in a fresh process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from kernels_ext_npu.distribution import published
from kernels_ext_npu.distribution.verification import verify_build
from publishing import trial
from publishing.apply import Applied
from publishing.remote import Remote, RemoteError, redact

TRIES = 3


def check_branch(remote: Remote, applied: Applied) -> int:
    """Check that the commit holds what was planned and that nothing else has changed in it; count the files downloaded.

    Raises:
        RemoteError: it does not, or the Hub could not be asked.
    """

    def step() -> tuple[int, list[str]]:
        tree = remote.tree(applied.commit)
        problems = applied.last.misfits(tree)
        with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-") as cache:
            folder, differences = published.download(remote.api, remote.repo_id, applied.commit, Path(cache))
            problems += differences
            if (folder / "build").is_dir() and applied.last.branch != "main":
                ours = {folder.split("/")[1] for folder in applied.last.wanted.owned}
                for entry in verify_build(folder / "build"):
                    problems += [f"{entry.variant}/{line}" for line in entry.problems if entry.variant in ours]
        return len(tree), problems

    files, problems = remote.persist(f"{remote.repo_id}, reading {applied.last.branch} again", step)
    if problems:
        raise RemoteError(
            f"{remote.repo_id}, branch {applied.last.branch} at {applied.commit} is not what was published:\n  "
            + "\n  ".join(problems)
        )
    return files


def check_loading(remote: Remote, version: int, applied: Applied) -> dict[str, Any]:
    """Load and run the version, or the pull request for it, in a fresh process with an empty cache."""
    revision = applied.commit if applied.pull_request else None
    for attempt in range(1, TRIES + 1):
        answer = trial.load_published(
            remote.repo_id,
            remote.api.endpoint,
            version=None if revision else version,
            revision=revision,
        )
        if "failure" not in answer:
            return answer
        if attempt < TRIES:
            remote.patience.wait(attempt)
    raise RemoteError(f"{remote.repo_id}, version {version} does not load: {redact(answer['failure'])}")
