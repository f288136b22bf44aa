"""Keep repositories in memory: contents by their hash, commits with their parents, and references."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone


class HubError(Exception):
    """Say what the Hub refuses: a status, the code that its clients read, and a text."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message} | ({} if code is None else {"X-Error-Code": code}) | headers


@dataclass(frozen=True)
class File:
    git_id: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Commit:
    id: str
    parent: str | None
    date: str
    files: dict[str, File]


Change = tuple[str, File | None]  # a path, and what it holds; None where the file goes


class Store:
    """Hold all repositories, and their contents by the sha256."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.contents: dict[str, bytes] = {}
        self.repositories: dict[tuple[str, str], Repository] = {}

    def create(self, kind: str, repo_id: str) -> Repository:
        with self.lock:
            if (kind, repo_id) in self.repositories:
                raise HubError(409, "You already created this repo")
            return self.repositories.setdefault((kind, repo_id), Repository(self))

    def get(self, kind: str, repo_id: str) -> Repository:
        with self.lock:
            if (kind, repo_id) not in self.repositories:
                raise HubError(404, "Repository not found", "RepoNotFound")
            return self.repositories[kind, repo_id]

    def delete(self, kind: str, repo_id: str) -> None:
        with self.lock:
            del self.repositories[kind, repo_id]

    def add_file(self, content: bytes) -> File:
        git_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        file = File(git_id, hashlib.sha256(content).hexdigest(), len(content))
        self.contents.setdefault(file.sha256, content)
        return file


class Repository:
    """Hold the commits of a repository, by their ids, and those of its `branches` and `pulls`, by their names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._commits: dict[str, Commit] = {}
        first = self._add_commit(None, {".gitattributes": store.add_file(b"*.so filter=lfs diff=lfs -text\n")})
        self._refs: dict[str, dict[str, str]] = {"branches": {"main": first.id}, "pulls": {}}

    # ---- references --------------------------------------------------------------------------------------------------
    def refs(self) -> dict[str, dict[str, str]]:
        with self._store.lock:
            return copy.deepcopy(self._refs)

    def create_branch(self, name: str, start: str) -> None:
        with self._store.lock:
            if name in self._refs["branches"]:
                raise HubError(409, f"Reference already exists: refs/heads/{name}")
            self._refs["branches"][name] = self.commit(start).id

    def delete_branch(self, name: str) -> None:
        with self._store.lock:
            if self._refs["branches"].pop(name, None) is None:
                raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")

    # ---- commits -----------------------------------------------------------------------------------------------------
    def commit(self, revision: str) -> Commit:
        """Find the commit of a branch, `refs/pr/N` or the id of a commit."""
        group, name = self._place_of(revision)
        found = self._refs[group].get(name, revision)
        if found not in self._commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self._commits[found]

    @staticmethod
    def _place_of(revision: str) -> tuple[str, str]:
        """Return the group and the name of the reference that a commit to a revision moves."""
        if revision.startswith("refs/pr/"):
            return "pulls", revision.removeprefix("refs/pr/")
        return "branches", revision.removeprefix("refs/heads/")

    def history(self, revision: str) -> list[Commit]:
        """List the commits from the newest to the first."""
        commits = [self.commit(revision)]
        while commits[-1].parent is not None:
            commits.append(self.commit(commits[-1].parent))
        return commits

    def add(self, revision: str, changes: list[Change], parent: str | None = None) -> Commit:
        """Make all changes in one commit of a branch, or none; with `parent` a branch that has moved on is refused."""
        group, name = self._place_of(revision)
        with self._store.lock:
            head = self.commit(revision)
            if name not in self._refs[group]:
                raise HubError(400, f"{revision} is no branch")
            if parent is not None and parent != head.id:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            commit = self._add_commit(head.id, self._changed(head.files, changes))
            self._refs[group][name] = commit.id
        return commit

    def propose(self, revision: str, changes: list[Change], parent: str | None = None) -> tuple[Commit, str]:
        """Open a pull request with one commit on top of `parent`; return that and the number."""
        with self._store.lock:
            head, number = self.commit(parent or revision), str(len(self._refs["pulls"]) + 1)
            commit = self._add_commit(head.id, self._changed(head.files, changes))
            self._refs["pulls"][number] = commit.id
        return commit, number

    def _add_commit(self, parent: str | None, files: dict[str, File]) -> Commit:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        commit = Commit("", parent, date, dict(sorted(files.items())))
        commit = replace(commit, id=hashlib.sha1(json.dumps(asdict(commit)).encode()).hexdigest())
        self._commits[commit.id] = commit
        return commit

    @staticmethod
    def _changed(files: dict[str, File], changes: list[Change]) -> dict[str, File]:
        changed = dict(files)
        for path, file in changes:
            if any(part in ("", ".", "..", ".git") for part in path.split("/")):
                raise HubError(400, f"Invalid path: {path!r}")
            if file is not None:
                changed[path] = file
            elif changed.pop(path, None) is None:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        return changed
