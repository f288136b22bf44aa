"""Keep repositories in memory: contents by their hash, commits with their parents, and references."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

KINDS = ("kernels", "models")
GITATTRIBUTES = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in ("bin", "o", "pt", "safetensors", "so", "tar.gz")
)


class HubError(Exception):
    """Say what the Hub refuses: a status, the code that its clients read, and a text."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers


@dataclass(frozen=True)
class File:
    git_id: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Commit:
    id: str
    parents: list[str]
    title: str
    message: str
    date: str
    files: dict[str, File]


class Store:
    """Hold all repositories, and their contents by the sha256."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.contents: dict[str, bytes] = {}
        self.repositories: dict[tuple[str, str], Repository] = {}

    def create(self, kind: str, repo_id: str) -> Repository:
        if kind not in KINDS or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo_id):
            raise HubError(400, f"no repository can be called {kind}/{repo_id}")
        with self.lock:
            if (kind, repo_id) in self.repositories:
                raise HubError(409, "You already created this repo")
            return self.repositories.setdefault((kind, repo_id), Repository(self, kind, repo_id))

    def get(self, kind: str, repo_id: str) -> Repository:
        with self.lock:
            if (kind, repo_id) not in self.repositories:
                raise HubError(404, "Repository not found", "RepoNotFound")
            return self.repositories[kind, repo_id]

    def delete(self, kind: str, repo_id: str) -> None:
        with self.lock:
            del self.repositories[kind, repo_id]

    def add_file(self, content: bytes) -> File:
        file = File(
            hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
            hashlib.sha256(content).hexdigest(),
            len(content),
        )
        self.contents.setdefault(file.sha256, content)
        return file


class Repository:
    """Hold the commits of a repository, by their ids, and those of its `branches` and `pulls`, by their names."""

    def __init__(self, store: Store, kind: str, repo_id: str) -> None:
        self.store, self.kind, self.id = store, kind, repo_id
        self._commits: dict[str, Commit] = {}
        first = self._add_commit([], "initial commit", "", {".gitattributes": store.add_file(GITATTRIBUTES.encode())})
        self._refs: dict[str, dict[str, str]] = {"branches": {"main": first.id}, "pulls": {}}

    # ---- references --------------------------------------------------------------------------------------------------
    def refs(self) -> dict[str, dict[str, str]]:
        return copy.deepcopy(self._refs)

    @contextlib.contextmanager
    def edited_refs(self) -> Iterator[dict[str, dict[str, str]]]:
        """Replace the references, under the lock; they stay as they were where the block raises."""
        with self.store.lock:
            refs = self.refs()
            yield refs
            self._refs = refs

    def create_branch(self, name: str, start: str) -> None:
        if name.startswith("refs/"):
            raise HubError(400, f"Invalid reference for a branch: {name}")
        with self.edited_refs() as refs:
            if name in refs["branches"]:
                raise HubError(409, f"Reference already exists: refs/heads/{name}")
            refs["branches"][name] = self.commit(start).id

    def delete_branch(self, name: str) -> None:
        with self.edited_refs() as refs:
            if name == "main":
                raise HubError(403, "The main branch cannot be deleted")
            if refs["branches"].pop(name, None) is None:
                raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")

    # ---- commits -----------------------------------------------------------------------------------------------------
    def commit(self, revision: str) -> Commit:
        """Find the commit of a branch, `refs/pr/N` or the id of a commit."""
        group, name = self.place_of(revision)
        found = self._refs[group].get(name, revision)
        if found not in self._commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self._commits[found]

    @staticmethod
    def place_of(revision: str) -> tuple[str, str]:
        """Return the group and the name of the reference that a commit to a revision moves."""
        if revision.startswith("refs/pr/"):
            return "pulls", revision.removeprefix("refs/pr/")
        return "branches", revision.removeprefix("refs/heads/")

    def history(self, revision: str) -> list[Commit]:
        """List the commits from the newest to the first."""
        commits = [self.commit(revision)]
        while commits[-1].parents:
            commits.append(self.commit(commits[-1].parents[0]))
        return commits

    def add(
        self,
        revision: str,
        title: str,
        message: str,
        changes: list[tuple[str, str, File | None]],
        parent: str | None = None,
        pull_request: bool = False,
    ) -> tuple[Commit, str | None]:
        """Make all `changes` in one commit, or none; return it and the number of the pull request that was opened.

        A change is ("add", path, file), ("delete", path, None) or ("delete folder", path, None). With `parent` a
        branch that has moved on is refused, and a pull request starts there.
        """
        with self.edited_refs() as refs:
            if pull_request:
                group, name = "pulls", str(len(refs["pulls"]) + 1)
                head = self.commit(parent or revision)
            else:
                group, name = self.place_of(revision)
                head = self.commit(revision)
                if name not in refs[group]:
                    raise HubError(400, f"{revision} is no branch")
                if parent is not None and parent != head.id:
                    raise HubError(412, "A commit has happened since. Please refresh and try again.")
            commit = self._add_commit([head.id], title, message, self._changed(head.files, changes))
            refs[group][name] = commit.id
        return commit, name if pull_request else None

    def _add_commit(self, parents: list[str], title: str, message: str, files: dict[str, File]) -> Commit:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        commit = Commit("", parents, title, message, date, dict(sorted(files.items())))
        commit = replace(commit, id=hashlib.sha1(json.dumps(asdict(commit)).encode()).hexdigest())
        self._commits[commit.id] = commit
        return commit

    @staticmethod
    def _changed(files: dict[str, File], changes: list[tuple[str, str, File | None]]) -> dict[str, File]:
        changed = dict(files)
        for action, path, file in changes:
            if not path or any(part in ("", ".", "..", ".git") for part in path.rstrip("/").split("/")):
                raise HubError(400, f"Invalid path: {path!r}")
            if file is not None:
                changed[path] = file
                continue
            folder = f"{path.rstrip('/')}/" if action == "delete folder" else None
            gone = [name for name in changed if name == path or (folder and name.startswith(folder))]
            if not gone:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            for name in gone:
                del changed[name]
        return changed
