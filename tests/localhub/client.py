"""Call the real client in the process of a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi

REPOSITORY = "kernels-ext-npu/RMSNorm"
TOKEN = "hf_that_nobody_may_write_down"


class Client:
    """Offer every method of HfApi that takes a repository, for one repository and without naming it."""

    def __init__(
        self, endpoint: str, repo_id: str = REPOSITORY, repo_type: str = "kernel", token: str | bool = TOKEN
    ) -> None:
        self.api, self.repo_id, self.repo_type = HfApi(endpoint=endpoint, token=token), repo_id, repo_type

    def __getattr__(self, name: str) -> Callable:
        method = getattr(self.api, name)
        return lambda *args, **kwargs: method(self.repo_id, *args, repo_type=self.repo_type, **kwargs)

    def commit(self, files: dict[str, bytes | Path], revision: str = "main", **options: Any) -> CommitInfo:
        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        return self.create_commit(operations, commit_message="a commit", revision=revision, **options)

    def head(self, revision: str = "main") -> str:
        return self.repo_info(revision=revision).sha

    def paths(self, revision: str = "main") -> list[str]:
        return self.list_repo_files(revision=revision)
