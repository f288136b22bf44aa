"""Serve repositories, their references and their histories over HTTP."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .shared import hub_of, parameter, repository_of, url_of
from .store import HubError


async def create(request: Request) -> Response:
    asked = await request.json()
    hub = hub_of(request)
    kind = f"{asked.get('type') or 'model'}s"
    repo_id = f"{asked.get('organization') or hub.settings.user}/{asked['name']}"
    if not hub.settings.may_create:
        raise HubError(403, f"You don't have the rights to create a {kind[:-1]} under this namespace")
    described = {"url": url_of(request, kind, repo_id), "name": repo_id, "id": repo_id}
    try:
        hub.store.create(kind, repo_id)
    except HubError as error:
        if error.status != 409:
            raise
        return JSONResponse(described | {"error": error.message}, 409, {"X-Error-Message": error.message})
    return JSONResponse(described)


async def info(request: Request) -> Response:
    """Describe a repository. A model lists its files, as older clients need; kernels' would stumble over it."""
    repository = repository_of(request)
    commit = repository.commit(parameter(request, "revision", "main"))
    described = {
        "id": repository.id,
        "author": repository.id.partition("/")[0],
        "sha": commit.id,
        "lastModified": commit.date,
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
    }
    if repository.kind == "models":
        described |= {"modelId": repository.id, "tags": [], "siblings": [{"rfilename": name} for name in commit.files]}
    return JSONResponse(described)


async def references(request: Request) -> Response:
    refs = repository_of(request).refs()

    def listed(group: str, prefix: str) -> list[dict[str, str]]:
        return [
            {"name": name, "ref": f"{prefix}{name}", "targetCommit": commit}
            for name, commit in sorted(refs[group].items())
        ]

    described = {"branches": listed("branches", "refs/heads/"), "tags": [], "converts": []}
    if "include_prs" in request.query_params:
        described["pullRequests"] = [entry | {"name": entry["ref"]} for entry in listed("pulls", "refs/pr/")]
    return JSONResponse(described)


async def create_branch(request: Request) -> Response:
    asked = await request.json() if await request.body() else {}
    repository_of(request).create_branch(parameter(request, "name_of_ref"), asked.get("startingPoint") or "main")
    return JSONResponse({})


async def delete_branch(request: Request) -> Response:
    repository_of(request).delete_branch(parameter(request, "name_of_ref"))
    return JSONResponse({})


REPOSITORY = "/api/{kind}/{organisation}/{name}"
ROUTES = [
    Route("/api/repos/create", create, methods=["POST"]),
    Route(REPOSITORY, info),
    Route(REPOSITORY + "/revision/{revision}", info),
    Route(REPOSITORY + "/refs", references),
    Route(REPOSITORY + "/branch/{name_of_ref}", create_branch, methods=["POST"]),
    Route(REPOSITORY + "/branch/{name_of_ref}", delete_branch, methods=["DELETE"]),
]
