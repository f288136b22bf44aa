"""Answer requests as huggingface.co does: of people and cards, of repositories and their files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.localhub.store import Change, Commit, HubError, Repository, Store


@dataclass
class Settings:
    """Set how the Hub behaves.

    - trusted: the organisations whose overview says that they are trusted publishers of kernels
    - token: the one that is required for writing; None accepts any, and none at all
    - may_create: whether repositories can be created; otherwise 403
    """

    trusted: set[str] = field(default_factory=set)
    token: str | None = None
    may_create: bool = True
    user: str = "tester"


@dataclass
class Answer:
    content: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        return cls(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})


@dataclass
class Request:
    """Hold what somebody asks for; `parts` are those of the path as it was sent, in which a slash may be quoted."""

    store: Store
    settings: Settings
    url: str
    method: str
    headers: Mapping[str, str]
    query: Mapping[str, list[str]]
    body: bytes
    parts: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return unquote(self.parts[name])

    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def is_true(self, name: str) -> bool:
        return self.query.get(name, [""])[0] in ("1", "true", "True")

    @property
    def token(self) -> str | None:
        return self.headers.get("authorization", "").removeprefix("Bearer ") or None

    @property
    def kind(self) -> str:
        return self.parts.get("kind") or "models"

    @property
    def repository(self) -> Repository:
        return self.store.get(self.kind, self["repo_id"])

    @property
    def commit(self) -> Commit:
        return self.repository.commit(unquote(self.parts.get("revision") or "main"))

    def url_of(self, kind: str, repo_id: str) -> str:
        return f"{self.url}/{'' if kind == 'models' else f'{kind}/'}{repo_id}"


ROUTES: list[tuple[str, re.Pattern[str], Callable[[Request], Answer]]] = []
ID = "(?P<repo_id>[^/]+/[^/]+)"
REPOSITORY = f"/api/(?P<kind>kernels|models)/{ID}"
# fetched by clients once a day on their own: counted, it would move the numbers of all other requests
REGISTRY = "/api/agent-harnesses"


def route(method: str, *paths: str) -> Callable[[Callable[[Request], Answer]], Callable[[Request], Answer]]:
    def enter(function: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
        ROUTES.extend((method, re.compile(path), function) for path in paths)
        return function

    return enter


def answer(request: Request, path: str) -> Answer:
    """Answer a request for a path as it was sent, or refuse it."""
    try:
        check_token(request, path)
        for method, pattern, function in ROUTES:
            if method == request.method.replace("HEAD", "GET") and (match := pattern.fullmatch(path)):
                request.parts = match.groupdict()
                return function(request)
        raise HubError(404, "Not Found")
    except HubError as error:
        return Answer.of({"error": error.message}, error.status, error.headers)


def check_token(request: Request, path: str) -> None:
    """Refuse a wrong token. Reading needs none."""
    required = request.settings.token
    if required is None or request.token == required:
        return
    if request.token is not None:
        raise HubError(401, "Invalid credentials in Authorization header")
    if request.method not in ("GET", "HEAD") and path != "/api/validate-yaml":
        raise HubError(401, "Invalid username or password.")


# ---- people and cards ------------------------------------------------------------------------------------------------
@route("GET", "/api/whoami-v2")
def whoami(request: Request) -> Answer:
    if request.token is None:
        raise HubError(401, "Invalid username or password.")
    user = {"type": "user", "name": request.settings.user, "fullname": request.settings.user, "orgs": []}
    return Answer.of(user | {"auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}})


@route("GET", "/api/organizations/(?P<name>[^/]+)/overview")
def organisation(request: Request) -> Answer:
    """Describe an organisation, of those that own a repository or are trusted."""
    name, trusted = request["name"], request["name"] in request.settings.trusted
    if not trusted and all(repo_id.partition("/")[0] != name for _, repo_id in request.store.repositories):
        raise HubError(404, "This organization does not exist")
    return Answer.of({"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": trusted})


@route("POST", "/api/validate-yaml")
def validate_yaml(request: Request) -> Answer:
    """Take any card: what is published has been checked before."""
    return Answer.of({"errors": [], "warnings": []})


@route("GET", f"{REGISTRY}.*")
def registry(request: Request) -> Answer:
    return Answer.of({"standardEnvVars": [], "harnesses": {}})


# ---- repositories, their references and their histories --------------------------------------------------------------
@route("POST", "/api/repos/create")
def create(request: Request) -> Answer:
    asked = request.json()
    kind = f"{asked.get('type') or 'model'}s"
    repo_id = f"{asked.get('organization') or request.settings.user}/{asked['name']}"
    if not request.settings.may_create:
        raise HubError(403, f"You don't have the rights to create a {kind[:-1]} under this namespace")
    described = {"url": request.url_of(kind, repo_id), "name": repo_id, "id": repo_id}
    try:
        request.store.create(kind, repo_id)
    except HubError as error:  # clients read where it is
        return Answer.of(described | {"error": error.message}, error.status, error.headers)
    return Answer.of(described)


@route("GET", REPOSITORY, f"{REPOSITORY}/revision/(?P<revision>[^/]+)")
def info(request: Request) -> Answer:
    """Describe a repository. A model lists its files, as older clients need; kernels' would stumble over it."""
    commit, repo_id = request.commit, request["repo_id"]
    described = {"id": repo_id, "author": repo_id.partition("/")[0], "sha": commit.id, "lastModified": commit.date}
    described |= dict.fromkeys(("private", "gated", "disabled"), False) | dict.fromkeys(("downloads", "likes"), 0)
    if request.kind == "models":
        described |= {"modelId": repo_id, "tags": [], "siblings": [{"rfilename": name} for name in commit.files]}
    return Answer.of(described)


@route("GET", f"{REPOSITORY}/refs")
def references(request: Request) -> Answer:
    refs = request.repository.refs()
    branches = [(name, f"refs/heads/{name}", commit) for name, commit in sorted(refs["branches"].items())]
    pulls = [(f"refs/pr/{number}", f"refs/pr/{number}", commit) for number, commit in sorted(refs["pulls"].items())]
    found = {"branches": branches, "tags": [], "converts": []}
    found |= {"pullRequests": pulls} if "include_prs" in request.query else {}
    names = "name", "ref", "targetCommit"
    return Answer.of({group: [dict(zip(names, each)) for each in listed] for group, listed in found.items()})


@route("POST", f"{REPOSITORY}/branch/(?P<branch>[^/]+)")
def create_branch(request: Request) -> Answer:
    request.repository.create_branch(request["branch"], request.json().get("startingPoint") or "main")
    return Answer.of({})


@route("DELETE", f"{REPOSITORY}/branch/(?P<branch>[^/]+)")
def delete_branch(request: Request) -> Answer:
    request.repository.delete_branch(request["branch"])
    return Answer.of({})


# ---- files -----------------------------------------------------------------------------------------------------------
@route("GET", f"{REPOSITORY}/tree/(?P<revision>[^/]+)/?(?P<path>.*)")
def tree(request: Request) -> Answer:
    """List the files and folders of a commit, or those in a folder, and with `recursive` those below."""
    commit, folder = request.commit, request["path"].rstrip("/")
    found: dict[str, dict[str, Any]] = {}
    for path, file in commit.files.items():
        found[path] = {"type": "file", "oid": file.git_id, "size": file.size, "path": path}
        parts = path.split("/")[:-1]
        for parent in ("/".join(parts[: depth + 1]) for depth in range(len(parts))):
            before = found.get(parent, {"oid": ""})["oid"]  # of a folder, from all that is in it
            oid = hashlib.sha1(f"{before} {path} {file.git_id}".encode()).hexdigest()
            found[parent] = {"type": "directory", "oid": oid, "size": 0, "path": parent}
    if folder and found.get(folder, {}).get("type") != "directory":
        raise entry_not_found(folder, commit)
    inside = [entry for path, entry in sorted(found.items()) if not folder or path.startswith(f"{folder}/")]
    depth = folder.count("/") + 1 if folder else 0
    return Answer.of([e for e in inside if request.is_true("recursive") or e["path"].count("/") == depth])


def entry_not_found(path: str, commit: Commit) -> HubError:
    return HubError(404, f"{path} does not exist", "EntryNotFound", **{"X-Repo-Commit": commit.id})


@route("POST", f"{REPOSITORY}/preupload/(?P<revision>[^/]+)")
def preupload(request: Request) -> Answer:
    """Say of each file that it is uploaded with the commit, as kernels of Python alone are, and what is there."""
    oids = {path: file.git_id for path, file in request.commit.files.items()}
    paths = [asked["path"] for asked in request.json()["files"]]
    said = {"uploadMode": "regular", "shouldIgnore": False}
    return Answer.of({"files": [{"path": path, "oid": oids.get(path)} | said for path in paths]})


@route("POST", f"{REPOSITORY}/commit/(?P<revision>[^/]+)")
def make_commit(request: Request) -> Answer:
    """Commit what the lines of the body say: a header and one operation each."""
    lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    changes = [change(request.store, line["key"], line["value"]) for line in lines if line["key"] != "header"]
    arguments = request["revision"], changes, header.get("parentCommit")
    url, described = request.url_of(request.kind, request["repo_id"]), {}
    if request.is_true("create_pr"):
        made, number = request.repository.propose(*arguments)
        described["pullRequestUrl"] = f"{url}/discussions/{number}"
    else:
        made = request.repository.add(*arguments)
    described |= {"success": True, "commitOid": made.id, "commitUrl": f"{url}/commit/{made.id}", "hookOutput": ""}
    return Answer.of(described)


def change(store: Store, key: str, value: dict[str, Any]) -> Change:
    if key == "file":
        encoded = value.get("encoding") == "base64"
        content = base64.b64decode(value["content"]) if encoded else value["content"].encode()
        return value["path"], store.add_file(content)
    if key == "deletedFile":
        return value["path"], None
    raise HubError(400, f"Unknown operation: {key}")


@route("GET", f"/(?:(?P<kind>kernels)/)?{ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(request: Request) -> Answer:
    """Send the content of a file, or its end."""
    commit, path = request.commit, request["path"]
    file = commit.files.get(path)
    if file is None:
        raise entry_not_found(path, commit)
    headers = {"ETag": f'"{file.git_id}"', "X-Repo-Commit": commit.id, "Content-Type": "application/octet-stream"}
    content, status = request.store.contents[file.sha256], 200
    if "range" in request.headers:  # of a download that goes on
        start = int(request.headers["range"].removeprefix("bytes=").rstrip("-"))
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        content, status = content[start:], 206
    return Answer(content, status, headers)
