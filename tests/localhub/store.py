"""Keep repositories in memory: commits with their files, and the branches and pull requests that end in them."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field


class HubError(Exception):
    """Say what the Hub refuses: a status, a text, and the code that its clients read."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({} if code is None else {"X-Error-Code": code}) | headers


@dataclass
class File:
    """Hold a content, and the hash by which git names the one that was sent: a test may change the content."""

    content: bytes
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    """Hold the files after the first commit, the second or one of a higher `number`."""

    id: str
    number: int
    files: dict[str, File]


Change = tuple[str, File | None]  # a path, and what it holds; None where the file goes


class Repository:
    """Hold commits by their ids, and the id of the last one of each branch and of each pull request."""

    def __init__(self) -> None:
        self._commits: dict[str, Commit] = {}
        first = self._add_commit(1, {".gitattributes": File(b"*.so filter=lfs diff=lfs -text\n")})
        self.branches = {"main": first.id}
        self.pulls: dict[str, str] = {}  # by names such as refs/pr/1

    def commit(self, revision: str = "main") -> Commit:
        """Find the last commit of a branch or of a pull request, or that of an id."""
        found = (self.branches | self.pulls).get(revision, revision)
        if found not in self._commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self._commits[found]

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: file.content for path, file in self.commit(revision).files.items()}

    def create_branch(self, name: str, start: str = "main") -> None:
        if name in self.branches:
            raise HubError(409, f"Reference already exists: refs/heads/{name}")
        self.branches[name] = self.commit(start).id

    def add(self, branch: str, changes: list[Change], parent: str | None = None) -> Commit:
        """Make all changes in one commit of a branch, or none; with `parent` a branch that has moved on is refused."""
        head = self.commit(branch)
        if branch not in self.branches:
            raise HubError(400, f"{branch} is no branch")
        if parent not in (None, head.id):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        commit = self._changed(head, changes)
        self.branches[branch] = commit.id
        return commit

    def propose(self, parent: str, changes: list[Change]) -> tuple[Commit, int]:
        """Open a pull request with one commit on top of `parent`; return that and the number."""
        commit, number = self._changed(self.commit(parent), changes), len(self.pulls) + 1
        self.pulls[f"refs/pr/{number}"] = commit.id
        return commit, number

    def _changed(self, head: Commit, changes: list[Change]) -> Commit:
        files = dict(head.files)
        for path, file in changes:
            if file is not None:
                files[path] = file
            elif files.pop(path, None) is None:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        return self._add_commit(head.number + 1, files)

    def _add_commit(self, number: int, files: dict[str, File]) -> Commit:
        commit = Commit(secrets.token_hex(20), number, dict(sorted(files.items())))
        self._commits[commit.id] = commit
        return commit


class Store:
    """Hold all repositories by kind and id, and the organisations that are `trusted` publishers of kernels."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.trusted: set[str] = set()

    def create(self, repo_id: str, kind: str = "kernels") -> Repository:
        if (kind, repo_id) in self.repositories:
            raise HubError(409, "You already created this repo")
        return self.repositories.setdefault((kind, repo_id), Repository())

    def repository(self, repo_id: str, kind: str = "kernels") -> Repository:
        if (kind, repo_id) not in self.repositories:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return self.repositories[kind, repo_id]

    def publish(self, repo_id: str, files: dict[str, bytes], branch: str = "v1", kind: str = "kernels") -> str:
        """Commit files to a branch of a repository, which are made if they are not there; return the commit."""
        repository = self.repositories.get((kind, repo_id)) or self.create(repo_id, kind)
        if branch not in repository.branches:
            repository.create_branch(branch)
        return repository.add(branch, [(path, File(content)) for path, content in files.items()]).id
