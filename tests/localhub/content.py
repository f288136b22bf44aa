"""Serve files over HTTP: listing, uploading, committing and downloading them."""

import base64
import fnmatch
import hashlib
import json
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from .repositories import REPOSITORY
from .shared import hub_of, page, parameter, repository_of, url_of
from .store import GITATTRIBUTES, Commit, File, HubError, Repository, Store, git_id, lfs_pointer

LARGE = 10 * 2**20


# ---- listing ---------------------------------------------------------------------------------------------------------
def entries(repository: Repository, commit: Commit, expand: bool) -> dict[str, dict[str, Any]]:
    """List every file and folder of a commit, by path."""
    found: dict[str, dict[str, Any]] = {}
    contents: dict[str, list[str]] = {}
    for path, file in commit.files.items():
        found[path] = {"type": "file", "oid": file.git_id, "size": file.size, "path": path}
        if file.lfs:
            pointer_size = len(lfs_pointer(file.sha256, file.size))
            found[path]["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": pointer_size}
        parts = path.split("/")
        for depth in range(1, len(parts)):
            contents.setdefault("/".join(parts[:depth]), []).append(f"{path} {file.git_id}")
    for path, inside in contents.items():
        oid = hashlib.sha1("\n".join(sorted(inside)).encode()).hexdigest()
        found[path] = {"type": "directory", "oid": oid, "size": 0, "path": path}
    if expand:
        for path, entry in found.items():
            entry["lastCommit"] = last_change(repository, commit, path)
    return dict(sorted(found.items()))


def last_change(repository: Repository, commit: Commit, path: str) -> dict[str, str]:
    def at(commit: Commit) -> list[tuple[str, File]]:
        return [item for item in commit.files.items() if f"{item[0]}/".startswith(f"{path}/")]

    while commit.parents and at(parent := repository.commit(commit.parents[0])) == at(commit):
        commit = parent
    return {"id": commit.id, "title": commit.title, "date": commit.date}


def is_true(value: str | None) -> bool:
    return value in ("1", "true", "True")


async def tree(request: Request) -> Response:
    repository = repository_of(request)
    commit = repository.commit(parameter(request, "revision"))
    folder = parameter(request, "path", "").rstrip("/")
    found = entries(repository, commit, is_true(request.query_params.get("expand")))
    if folder and found.get(folder, {}).get("type") != "directory":
        raise entry_not_found(folder, commit)
    inside = {path: entry for path, entry in found.items() if not folder or path.startswith(f"{folder}/")}
    if not is_true(request.query_params.get("recursive")):
        depth = folder.count("/") + 1 if folder else 0
        inside = {path: entry for path, entry in inside.items() if path.count("/") == depth}
    return page(request, list(inside.values()))


async def paths_info(request: Request) -> Response:
    """Describe the paths that a form asks for; those that do not exist are left out."""
    repository = repository_of(request)
    commit = repository.commit(parameter(request, "revision"))
    body = (await request.body()).decode()
    is_json = "json" in request.headers.get("content-type", "")
    asked = json.loads(body) if is_json else parse_qs(body)
    expand = is_true(str(asked["expand"] if is_json else asked.get("expand", [""])[0]))
    found = entries(repository, commit, expand)
    return JSONResponse([found[path] for path in asked.get("paths", []) if path in found])


def entry_not_found(path: str, commit: Commit) -> HubError:
    return HubError(404, f"{path} does not exist", "EntryNotFound", **{"X-Repo-Commit": commit.id})


# ---- uploading -------------------------------------------------------------------------------------------------------
async def preupload(request: Request) -> Response:
    """Say of each file how it has to be uploaded, and what is there.

    There is no Xet storage, and a client with hf_xet knows no other for the files of LFS: it finds no token, and fails,
    unless HF_HUB_DISABLE_XET=1 is set or every file is a regular one.
    """
    present = repository_of(request).commit(parameter(request, "revision")).files
    lfs = hub_of(request).settings.lfs
    answers = []
    for asked in (await request.json())["files"]:
        large = lfs and is_large(asked["path"], base64.b64decode(asked.get("sample", "")), asked["size"])
        file = present.get(asked["path"])
        oid = None if file is None else file.sha256 if file.lfs and large else file.git_id
        mode = "lfs" if large else "regular"
        answers.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return JSONResponse({"files": answers})


def is_large(path: str, sample: bytes, size: int) -> bool:
    patterns = [line.split()[0] for line in GITATTRIBUTES.splitlines()]
    name = path.rpartition("/")[2]
    return size > LARGE or b"\0" in sample or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


async def lfs_batch(request: Request) -> Response:
    """Say where to upload the objects that are not there yet."""
    repository_of(request)
    store = hub_of(request).store
    answers = []
    for asked in (await request.json())["objects"]:
        answer = {"oid": asked["oid"], "size": asked["size"]}
        if not store.has_blob(asked["oid"]):
            upload, verify = (f"{request.base_url}lfs/{action}/{asked['oid']}" for action in ("upload", "verify"))
            answer["actions"] = {"upload": {"href": upload, "header": {}}, "verify": {"href": verify}}
        answers.append(answer)
    return JSONResponse({"transfer": "basic", "objects": answers})


async def lfs_upload(request: Request) -> Response:
    content = await request.body()
    if hashlib.sha256(content).hexdigest() != request.path_params["oid"]:
        raise HubError(400, "The content does not have the hash under which it is uploaded")
    hub_of(request).store.add_blob(content)
    return Response()


async def lfs_verify(request: Request) -> Response:
    asked = await request.json()
    store = hub_of(request).store
    if not store.has_blob(asked["oid"]) or store.blob(asked["oid"]).stat().st_size != asked["size"]:
        raise HubError(404, "The object has not been uploaded")
    return JSONResponse({})


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
    if key == "lfsFile":
        if not store.has_blob(value["oid"]):
            raise HubError(400, f"The LFS object of {path} has not been uploaded")
        size = store.blob(value["oid"]).stat().st_size
        return "add", path, File(git_id(lfs_pointer(value["oid"], size)), value["oid"], size, lfs=True)
    if key in ("deletedFile", "deletedFolder"):
        return "delete" if key == "deletedFile" else "delete folder", path, None
    raise HubError(400, f"Unknown operation: {key}")


# ---- downloading -----------------------------------------------------------------------------------------------------
async def resolve(request: Request) -> Response:
    """Send the content of a file, or a range of it."""
    repository = repository_of(request)
    commit = repository.commit(parameter(request, "revision"))
    path = parameter(request, "path")
    file = commit.files.get(path)
    if file is None:
        raise entry_not_found(path, commit)
    headers = {"ETag": f'"{file.sha256 if file.lfs else file.git_id}"', "X-Repo-Commit": commit.id}
    if file.lfs:
        headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
    blob = hub_of(request).store.blob(file.sha256)
    return FileResponse(blob, headers=headers, media_type="application/octet-stream")


ROUTES = [
    Route(REPOSITORY + "/tree/{revision}", tree),
    Route(REPOSITORY + "/tree/{revision}/{path:path}", tree),
    Route(REPOSITORY + "/paths-info/{revision}", paths_info, methods=["POST"]),
    Route(REPOSITORY + "/preupload/{revision}", preupload, methods=["POST"]),
    Route(REPOSITORY + "/commit/{revision}", commit, methods=["POST"]),
    Route("/lfs/upload/{oid}", lfs_upload, methods=["PUT"]),
    Route("/lfs/verify/{oid}", lfs_verify, methods=["POST"]),
    Route("/{organisation}/{name}.git/info/lfs/objects/batch", lfs_batch, methods=["POST"]),
    Route("/{kind}/{organisation}/{name}.git/info/lfs/objects/batch", lfs_batch, methods=["POST"]),
    Route("/{organisation}/{name}/resolve/{revision}/{path:path}", resolve),
    Route("/{kind}/{organisation}/{name}/resolve/{revision}/{path:path}", resolve),
]
