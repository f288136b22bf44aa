"""Answer requests as huggingface.co does: for organisations and cards, for repositories and their files."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from tests.localhub.store import Change, Commit, File, HubError, Repository, Store


@dataclass
class Answer:
    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        return cls(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})


@dataclass
class Request:
    """Hold what somebody asks for; `parts` are those of the path as it was sent, in which a slash may be quoted."""

    store: Store
    url: str
    method: str
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    parts: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return unquote(self.parts.get(name) or {"kind": "models", "revision": "main"}[name])

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def repository(self) -> Repository:
        return self.store.repository(self["repo_id"], self["kind"])

    @property
    def commit(self) -> Commit:
        return self.repository.commit(self["revision"])

    def blob_url(self, kind: str, repo_id: str) -> str:
        return f"{self.url}/{'' if kind == 'models' else f'{kind}/'}{repo_id}"


ROUTES: list[tuple[str, re.Pattern[str], Callable[[Request], Answer]]] = []
ID = "(?P<repo_id>[^/]+/[^/]+)"
REPOSITORY = f"/api/(?P<kind>kernels|models)/{ID}"


def route(method: str, *paths: str) -> Callable[[Callable[[Request], Answer]], Callable[[Request], Answer]]:
    def enter(function: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
        ROUTES.extend((method, re.compile(path), function) for path in paths)
        return function

    return enter


def answer(request: Request, path: str) -> Answer:
    """Answer a request for a path as it was sent, or refuse it."""
    try:
        for method, pattern, function in ROUTES:
            if method == request.method.replace("HEAD", "GET") and (match := pattern.fullmatch(path)):
                request.parts = match.groupdict()
                return function(request)
        raise HubError(404, "Not Found")
    except HubError as error:
        return Answer.of({"error": str(error)}, error.status, error.headers)


# ---- organisations and cards -----------------------------------------------------------------------------------------
@route("GET", "/api/organizations/(?P<name>[^/]+)/overview")
def organisation(request: Request) -> Answer:
    return Answer.of({"name": request["name"], "trustedKernelPublisher": request["name"] in request.store.trusted})


@route("POST", "/api/validate-yaml")
def validate_yaml(request: Request) -> Answer:
    """Take any card: what is published has been checked before."""
    return Answer.of({"errors": [], "warnings": []})


# ---- repositories and their references -------------------------------------------------------------------------------
@route("POST", "/api/repos/create")
def create(request: Request) -> Answer:
    asked = request.json()
    kind, repo_id = f"{asked.get('type') or 'model'}s", f"{asked['organization']}/{asked['name']}"
    described = {"url": request.blob_url(kind, repo_id)}
    try:
        request.store.create(repo_id, kind)
    except HubError as error:  # clients read where it is
        return Answer.of(described | {"error": str(error)}, error.status, error.headers)
    return Answer.of(described)


@route("GET", REPOSITORY, f"{REPOSITORY}/revision/(?P<revision>[^/]+)")
def info(request: Request) -> Answer:
    """Describe a repository. A model lists its files, as older clients need; kernels' would stumble over it."""
    commit = request.commit
    described: dict[str, Any] = {"id": request["repo_id"], "sha": commit.id}
    if request["kind"] == "models":
        described["siblings"] = [{"rfilename": name} for name in commit.files]
    return Answer.of(described)


@route("GET", f"{REPOSITORY}/refs")
def references(request: Request) -> Answer:
    repository = request.repository
    heads = {f"refs/heads/{name}": (name, commit) for name, commit in sorted(repository.branches.items())}
    pulls = {ref: (ref, commit) for ref, commit in sorted(repository.pulls.items())}
    found: dict[str, Any] = {"branches": heads, "tags": {}, "converts": {}}
    found |= {"pullRequests": pulls} if "include_prs" in request.query else {}
    return Answer.of(
        {
            group: [{"name": name, "ref": ref, "targetCommit": commit} for ref, (name, commit) in refs.items()]
            for group, refs in found.items()
        }
    )


@route("POST", f"{REPOSITORY}/branch/(?P<branch>[^/]+)")
def create_branch(request: Request) -> Answer:
    request.repository.create_branch(request["branch"], request.json().get("startingPoint", "main"))
    return Answer.of({})


@route("DELETE", f"{REPOSITORY}/branch/(?P<branch>[^/]+)")
def delete_branch(request: Request) -> Answer:
    if request.repository.branches.pop(request["branch"], None) is None:
        raise HubError(404, f"Invalid rev id: {request['branch']}", "RevisionNotFound")
    return Answer.of({})


# ---- files -----------------------------------------------------------------------------------------------------------
@route("GET", f"{REPOSITORY}/tree/(?P<revision>[^/]+)/?(?P<path>.*)")
def tree(request: Request) -> Answer:
    """List the files and folders in a folder of a commit, and with `recursive` those below."""
    commit, top = request.commit, PurePosixPath(unquote(request.parts["path"]))
    folders = {parent for path in commit.files for parent in PurePosixPath(path).parents}
    if top not in folders:
        raise entry_not_found(str(top), commit)
    found = [{"type": "directory", "oid": "0" * 40, "path": str(folder)} for folder in folders]
    for path, file in commit.files.items():
        found.append({"type": "file", "oid": file.id, "size": len(file.content), "path": path})
    depth = None if request.query.get("recursive") == "true" else 1
    return Answer.of([entry for entry in found if top in list(PurePosixPath(entry["path"]).parents)[:depth]])


def entry_not_found(path: str, commit: Commit) -> HubError:
    return HubError(404, f"{path} does not exist", "EntryNotFound", **{"X-Repo-Commit": commit.id})


@route("POST", f"{REPOSITORY}/preupload/(?P<revision>[^/]+)")
def preupload(request: Request) -> Answer:
    """Say of each file that it is uploaded with the commit, as kernels of Python alone are, and what is there."""
    oids = {path: file.id for path, file in request.commit.files.items()}
    paths = [asked["path"] for asked in request.json()["files"]]
    said = {"uploadMode": "regular", "shouldIgnore": False}
    return Answer.of({"files": [{"path": path, "oid": oids.get(path)} | said for path in paths]})


@route("POST", f"{REPOSITORY}/commit/(?P<revision>[^/]+)")
def make_commit(request: Request) -> Answer:
    """Commit what the lines of the body say: a header and one operation each."""
    header, *operations = map(json.loads, request.body.splitlines())
    changes = [change(**operation) for operation in operations]
    branch, parent = request["revision"], header["value"].get("parentCommit")
    url, described = request.blob_url(request["kind"], request["repo_id"]), {}
    if "create_pr" in request.query:
        made, number = request.repository.propose(parent or branch, changes)
        described["pullRequestUrl"] = f"{url}/discussions/{number}"
    else:
        made = request.repository.add(branch, changes, parent)
    return Answer.of(described | {"commitOid": made.id, "commitUrl": f"{url}/commit/{made.id}"})


def change(key: str, value: dict[str, Any]) -> Change:
    if key not in ("file", "deletedFile"):
        raise HubError(400, f"Unknown operation: {key}")
    return value["path"], File(base64.b64decode(value["content"])) if key == "file" else None


@route("GET", f"/(?:(?P<kind>kernels)/)?{ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(request: Request) -> Answer:
    """Send the content of a file, or its end."""
    commit, path = request.commit, request["path"]
    file = commit.files.get(path)
    if file is None:
        raise entry_not_found(path, commit)
    headers = {"ETag": f'"{file.id}"', "X-Repo-Commit": commit.id, "Content-Type": "application/octet-stream"}
    content, status = file.content, 200
    if "range" in request.headers:  # of a download that goes on
        start = int(request.headers["range"].removeprefix("bytes=").rstrip("-"))
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        content, status = content[start:], 206
    return Answer(content, status, headers)
