"""Talk to a kernel repository on the Hub, and meet what may go wrong on the way to it."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.errors import HTTPError as TransportError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from kernels_ext_npu.distribution.published import KERNEL

CONFLICTS = (409, 412)
FINAL = (400, 401, 403)
FAILURES = (TransportError, OSError, json.JSONDecodeError)
NO_ACCESS = (
    "creating kernel repositories needs the approval of Hugging Face: ask for it on "
    "https://huggingface.co/settings/account, and check that the token may write to the organisation"
)
T = TypeVar("T")


class RefusedError(Exception):
    """Say why what is asked for cannot be done; nothing was tried. Each argument is a reason."""


class ChangedError(OSError):
    """Say that the Hub is not as an earlier answer said: a conflict, to plan again after."""


class RemoteError(Exception):
    """Say that the Hub changed or failed more often than we tried. The message says what it answered last."""


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

    def has_content(self, content: bytes) -> bool:
        """Tell whether these bytes are the content."""
        found = git_hash(content) if self.algorithm == "git" else hashlib.sha256(content).hexdigest()
        return found == self.hash


@dataclass
class Patience:
    """Set how often a step is tried, and how long to wait in between; a conflict means that others make progress."""

    failures: int = 4
    conflicts: int = 20
    seconds: float = 1.0

    def wait(self, attempt: int) -> None:
        time.sleep(self.seconds * random.uniform(0.5, 1.5) * min(2.0**attempt, 8.0))


@dataclass
class Remote:
    """Reach the repository `repo_id` behind an endpoint; all that is written goes through `publishing.apply`."""

    api: HfApi
    repo_id: str
    patience: Patience

    def heads(self) -> dict[str, str] | None:
        """Return the commit of each branch, None where there is no such repository."""
        try:
            refs = self.api.list_repo_refs(self.repo_id, repo_type=KERNEL)
        except RepositoryNotFoundError:
            return None
        return {branch.name: branch.target_commit for branch in refs.branches}

    def pull_requests(self) -> dict[str, str]:
        """Return the commit of each pull request by its number, the newest first."""
        refs = self.api.list_repo_refs(self.repo_id, repo_type=KERNEL, include_pull_requests=True)
        heads = {ref.ref.rpartition("/")[2]: ref.target_commit for ref in refs.pull_requests or []}
        return dict(sorted(heads.items(), key=lambda item: -int(item[0])))

    def tree(self, revision: str) -> dict[str, Content]:
        """Return every file of a revision, by its path."""
        entries = self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision, repo_type=KERNEL)
        return {
            file.path: Content("git", file.blob_id, file.size)
            if file.lfs is None
            else Content("sha256", file.lfs.sha256, file.size)
            for file in entries
            if isinstance(file, RepoFile)
        }

    def persist(self, what: str, step: Callable[[], T]) -> T:
        """Do a step, again from its start where the Hub fails or has changed in the meantime.

        Raises:
            RemoteError: it refuses for good, or the patience is at its end.
        """
        failures = conflicts = 0
        while True:
            try:
                return step()
            except FAILURES as error:  # noqa: PERF203
                conflict = status(error) in CONFLICTS or isinstance(error, ChangedError)
                conflicts, failures = conflicts + conflict, failures + (not conflict)
                over = failures >= self.patience.failures or conflicts >= self.patience.conflicts
                if over or status(error) in FINAL or isinstance(error, (OfflineModeIsEnabled, RepositoryNotFoundError)):
                    raise RemoteError(f"{what}: {explain(error)}") from error
                self.patience.wait(min(failures + conflicts, 3))


def status(error: Exception) -> int | None:
    """Return the status of the answer that an error comes from."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def explain(error: Exception) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it to publish"
    text = redact(" ".join(str(error).split())) or type(error).__name__
    return f"{text} ({NO_ACCESS})" if status(error) == 403 else text


def redact(text: str) -> str:
    """Take tokens out of a text: a server may repeat what it was sent."""
    token = get_token()
    return text.replace(token, "<token>") if token else text
