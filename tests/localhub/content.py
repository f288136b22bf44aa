"""Serve files over HTTP: listing, uploading, committing and downloading them."""

import base64
import hashlib
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .repositories import REPOSITORY
from .shared import hub_of, parameter, repository_of, url_of
from .store import Commit, File, HubError, Store


# ---- listing ---------------------------------------------------------------------------------------------------------
def entries(commit: Commit) -> dict[str, dict[str, Any]]:
    """List every file and folder of a commit, by path."""
    found: dict[str, dict[str, Any]] = {}
    contents: dict[str, list[str]] = {}
    for path, file in commit.files.items():
        found[path] = {"type": "file", "oid": file.git_id, "size": file.size, "path": path}
        parts = path.split("/")
        for depth in range(1, len(parts)):
            contents.setdefault("/".join(parts[:depth]), []).append(f"{path} {file.git_id}")
    for path, inside in contents.items():
        oid = hashlib.sha1("\n".join(sorted(inside)).encode()).hexdigest()
        found[path] = {"type": "directory", "oid": oid, "size": 0, "path": path}
    return dict(sorted(found.items()))


def is_true(value: str | None) -> bool:
    return value in ("1", "true", "True")


async def tree(request: Request) -> Response:
    repository = repository_of(request)
    commit = repository.commit(parameter(request, "revision"))
    folder = parameter(request, "path", "").rstrip("/")
    found = entries(commit)
    if folder and found.get(folder, {}).get("type") != "directory":
        raise entry_not_found(folder, commit)
    inside = {path: entry for path, entry in found.items() if not folder or path.startswith(f"{folder}/")}
    if not is_true(request.query_params.get("recursive")):
        depth = folder.count("/") + 1 if folder else 0
        inside = {path: entry for path, entry in inside.items() if path.count("/") == depth}
    return JSONResponse(list(inside.values()))


def entry_not_found(path: str, commit: Commit) -> HubError:
    return HubError(404, f"{path} does not exist", "EntryNotFound", **{"X-Repo-Commit": commit.id})


# ---- uploading -------------------------------------------------------------------------------------------------------
async def preupload(request: Request) -> Response:
    """Say of each file that it is uploaded with the commit, as kernels of Python alone are, and what is there."""
    present = repository_of(request).commit(parameter(request, "revision")).files
    answers = []
    for asked in (await request.json())["files"]:
        file = present.get(asked["path"])
        oid = None if file is None else file.git_id
        answers.append({"path": asked["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
    return JSONResponse({"files": answers})


async def commit(request: Request) -> Response:
    """Commit what the lines of the body say: a header and one operation each."""
    repository, revision = repository_of(request), parameter(request, "revision")
    lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    changes = [change(hub_of(request).store, line["key"], line["value"]) for line in lines if line["key"] != "header"]
    made, pull_request = repository.add(
        revision,
        header["summary"],
        header.get("description") or "",
        changes,
        header.get("parentCommit"),
        is_true(request.query_params.get("create_pr")),
    )
    url = url_of(request, repository.kind, repository.id)
    answer = {"success": True, "commitOid": made.id, "commitUrl": f"{url}/commit/{made.id}", "hookOutput": ""}
    if pull_request is not None:
        answer["pullRequestUrl"] = f"{url}/discussions/{pull_request}"
    return JSONResponse(answer)


def change(store: Store, key: str, value: dict[str, Any]) -> tuple[str, str, File | None]:
    path = value["path"]
    if key == "file":
        encoded = value.get("encoding") == "base64"
        return "add", path, store.add_file(base64.b64decode(value["content"]) if encoded else value["content"].encode())
    if key in ("deletedFile", "deletedFolder"):
        return "delete" if key == "deletedFile" else "delete folder", path, None
    raise HubError(400, f"Unknown operation: {key}")


# ---- downloading -----------------------------------------------------------------------------------------------------
async def resolve(request: Request) -> Response:
    """Send the content of a file, or its end."""
    repository = repository_of(request)
    commit = repository.commit(parameter(request, "revision"))
    path = parameter(request, "path")
    file = commit.files.get(path)
    if file is None:
        raise entry_not_found(path, commit)
    headers = {"ETag": f'"{file.git_id}"', "X-Repo-Commit": commit.id}
    content, status = hub_of(request).store.contents[file.sha256], 200
    if "range" in request.headers:  # of a download that goes on
        start = int(request.headers["range"].removeprefix("bytes=").rstrip("-"))
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        content, status = content[start:], 206
    return Response(content, status, headers, "application/octet-stream")


ROUTES = [
    Route(REPOSITORY + "/tree/{revision}", tree),
    Route(REPOSITORY + "/tree/{revision}/{path:path}", tree),
    Route(REPOSITORY + "/preupload/{revision}", preupload, methods=["POST"]),
    Route(REPOSITORY + "/commit/{revision}", commit, methods=["POST"]),
    Route("/{organisation}/{name}/resolve/{revision}/{path:path}", resolve),
    Route("/{kind}/{organisation}/{name}/resolve/{revision}/{path:path}", resolve),
]
