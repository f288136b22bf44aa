"""Make the application: all routes, how errors are answered, and who may ask."""

import re
from collections.abc import Callable

import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import content, repositories
from .faults import REGISTRY
from .shared import Hub, check_token, hub_of, parameter, token_of
from .store import HubError


def create_app(hub: Hub) -> Callable:
    routes = [*ROUTES, *repositories.ROUTES, *content.ROUTES]
    app = Starlette(
        routes=[Route(route.path, checked(route.endpoint), methods=list(route.methods or [])) for route in routes],
        exception_handlers={HubError: refused},
    )
    app.state.hub = hub

    async def with_quoted_path(scope: dict, receive: Callable, send: Callable) -> None:
        """Route by the path as sent: a quoted slash belongs to a revision or path, an unquoted one separates them."""
        await app(scope | {"path": scope["raw_path"].decode()}, receive, send)

    return with_quoted_path


def checked(endpoint: Callable) -> Callable:
    async def handler(request: Request) -> Response:
        check_token(request)
        return await endpoint(request)

    return handler


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HubError)
    headers = {"X-Error-Message": error.message} | error.headers
    if error.code is not None:
        headers["X-Error-Code"] = error.code
    return JSONResponse({"error": error.message}, error.status, headers)


# ---- people and cards ------------------------------------------------------------------------------------------------
async def whoami(request: Request) -> Response:
    if token_of(request) is None:
        raise HubError(401, "Invalid username or password.")
    token = {"displayName": "test", "role": "write"}
    user = {"type": "user", "name": hub_of(request).settings.user, "fullname": hub_of(request).settings.user}
    return JSONResponse(user | {"orgs": [], "auth": {"type": "access_token", "accessToken": token}})


async def organisation(request: Request) -> Response:
    """Describe an organisation, of those that own a repository or are trusted."""
    hub, name = hub_of(request), parameter(request, "organisation")
    owns = any(repo_id.partition("/")[0] == name for _, repo_id in hub.store.repositories)
    if not owns and name not in hub.settings.trusted:
        raise HubError(404, "This organization does not exist")
    trusted = name in hub.settings.trusted
    return JSONResponse({"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": trusted})


async def validate_yaml(request: Request) -> Response:
    """Check the front matter of a card: a mapping, with a license in lower case if it has one."""
    match = re.match(r"---\r?\n(.*?)^---\s*$", (await request.json())["content"], re.DOTALL | re.MULTILINE)
    if match is None:
        return JSONResponse({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    errors = []
    try:
        fields = yaml.safe_load(match[1])
        if not isinstance(fields, dict):
            errors.append("the metadata is not a mapping")
        elif not re.fullmatch(r"[a-z0-9.-]+", str(fields.get("license", "other"))):
            errors.append(f'"license" must be one of the known ids, not {fields["license"]!r}')
    except yaml.YAMLError as error:
        errors.append(str(error))
    return JSONResponse({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)


async def registry(request: Request) -> Response:
    return JSONResponse({"standardEnvVars": [], "harnesses": {}})


ROUTES = [
    Route("/api/whoami-v2", whoami),
    Route(REGISTRY, registry),
    Route("/api/organizations/{organisation}/overview", organisation),
    Route("/api/validate-yaml", validate_yaml, methods=["POST"]),
]
