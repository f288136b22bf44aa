"""Share what the handlers have in common: the state of the Hub, access, and the repository of a request."""

from dataclasses import dataclass, field
from urllib.parse import unquote

from starlette.requests import Request

from .faults import Faults
from .store import HubError, Repository, Store


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
class Hub:
    store: Store
    settings: Settings
    faults: Faults


def hub_of(request: Request) -> Hub:
    return request.app.state.hub


def parameter(request: Request, name: str, default: str | None = None) -> str:
    """Read a part of the path: quoted slashes are part of it."""
    value = request.path_params.get(name, default)
    assert value is not None
    return unquote(value)


def repository_of(request: Request) -> Repository:
    repo_id = f"{parameter(request, 'organisation')}/{parameter(request, 'name')}"
    return hub_of(request).store.get(parameter(request, "kind", "models"), repo_id)


def url_of(request: Request, kind: str, repo_id: str) -> str:
    return f"{request.base_url}{'' if kind == 'models' else f'{kind}/'}{repo_id}"


def token_of(request: Request) -> str | None:
    return request.headers.get("authorization", "").removeprefix("Bearer ") or None


def check_token(request: Request) -> None:
    """Refuse a wrong token. Reading needs none."""
    required, sent = hub_of(request).settings.token, token_of(request)
    if required is None or sent == required:
        return
    if sent is not None:
        raise HubError(401, "Invalid credentials in Authorization header")
    asks = request.method in ("GET", "HEAD") or request.url.path.startswith("/api/validate-yaml")
    if not asks:
        raise HubError(401, "Invalid username or password.")
