"""Keep repositories in a folder: blobs by their hash, commits with their parents, and one file of references.

    blobs/<sha256>                           the content of all repositories
    kernels/<organisation>/<name>/
        repository.json                      {"private": false}
        commits/<id>.json                    title, parents, and every file of the tree
        refs.json                            {"branches": {}, "pulls": {}}, replaced in one step

A commit becomes visible when `refs.json` is replaced, so a server that is killed leaves the old state or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

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


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file in one step: other readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.RLock()

    def create(self, kind: str, repo_id: str, private: bool = False) -> Repository:
        if kind not in KINDS or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo_id):
            raise HubError(400, f"no repository can be called {kind}/{repo_id}")
        with self.lock:
            repository = Repository(self, kind, repo_id)
            if repository.folder.exists():
                raise HubError(409, "You already created this repo")
            first = repository.add_commit([], "initial commit", "", repository.changed({}, [file_at_first(self)]))
            write(repository.folder / "repository.json", json.dumps({"private": private}).encode())
            repository.write_refs({"branches": {"main": first.id}, "pulls": {}})
            return repository

    def get(self, kind: str, repo_id: str) -> Repository:
        repository = Repository(self, kind, repo_id)
        if ".." in repo_id or not (repository.folder / "refs.json").is_file():
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repository

    def delete(self, kind: str, repo_id: str) -> None:
        with self.lock:
            shutil.rmtree(self.get(kind, repo_id).folder)

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def has_blob(self, sha256: str) -> bool:
        return re.fullmatch("[0-9a-f]{64}", sha256) is not None and self.blob(sha256).is_file()

    def add_blob(self, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        if not self.has_blob(sha256):
            write(self.blob(sha256), content)
        return sha256

    def add_file(self, content: bytes) -> File:
        return File(git_id(content), self.add_blob(content), len(content))


def file_at_first(store: Store) -> tuple[str, str, File]:
    """Make what the Hub puts into a repository that it creates."""
    return "add", ".gitattributes", store.add_file(GITATTRIBUTES.encode())


class Repository:
    def __init__(self, store: Store, kind: str, repo_id: str) -> None:
        self.store, self.kind, self.id = store, kind, repo_id
        self.folder = store.root / kind / repo_id

    @property
    def private(self) -> bool:
        return json.loads((self.folder / "repository.json").read_text())["private"]

    # ---- references --------------------------------------------------------------------------------------------------
    def refs(self) -> dict[str, dict[str, str]]:
        """Read the commits of `branches` and `pulls`, by name."""
        return json.loads((self.folder / "refs.json").read_text())

    def write_refs(self, refs: dict[str, dict[str, str]]) -> None:
        write(self.folder / "refs.json", json.dumps(refs, indent=1).encode())

    @contextlib.contextmanager
    def edited_refs(self) -> Iterator[dict[str, dict[str, str]]]:
        """Read the references and replace them, under the lock; they stay as they were where the block raises."""
        with self.store.lock:
            refs = self.refs()
            yield refs
            self.write_refs(refs)

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
        found = self.refs()[group].get(name) or revision
        path = self.folder / "commits" / f"{found}.json"
        if not re.fullmatch("[0-9a-f]{40}", found) or not path.is_file():
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        fields = json.loads(path.read_text())
        return Commit(**fields | {"files": {name: File(**file) for name, file in fields["files"].items()}})

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

    def add_commit(self, parents: list[str], title: str, message: str, files: dict[str, File]) -> Commit:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        fields = asdict(Commit("", parents, title, message, date, dict(sorted(files.items()))))
        fields["id"] = hashlib.sha1(json.dumps(fields).encode()).hexdigest()
        write(self.folder / "commits" / f"{fields['id']}.json", json.dumps(fields).encode())
        return Commit(fields["id"], parents, title, message, date, files)

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
            commit = self.add_commit([head.id], title, message, self.changed(head.files, changes))
            refs[group][name] = commit.id
        return commit, name if pull_request else None

    @staticmethod
    def changed(files: dict[str, File], changes: list[tuple[str, str, File | None]]) -> dict[str, File]:
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
