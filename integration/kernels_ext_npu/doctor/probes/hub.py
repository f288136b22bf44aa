"""A probe that asks the Hub what `kernels` asks it, with its client, and without torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kernels_ext_npu.machine.processes import say

HEADERS = "asking as kernels"


def versions_and_publisher(timeout: float) -> None:
    """Ask the Hub for the kernels and their publisher, with so many seconds for each request."""
    say(step="import huggingface_hub")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import get_session

    from kernels_ext_npu import catalogue, sources
    from kernels_ext_npu.distribution.published import KERNEL

    quiet = constants.HF_HUB_DISABLE_TELEMETRY
    say(offline=constants.HF_HUB_OFFLINE, endpoint=constants.ENDPOINT, quiet=quiet)
    if constants.HF_HUB_OFFLINE:
        return
    get_session().timeout = timeout
    api = HfApi()
    repo_ids = {name: f"{sources.ORGANISATION}/{name}" for name in catalogue.REPOSITORIES}
    say(step="asking the Hub for versions")
    say(versions={name: _head(api, repo_id) for name, repo_id in repo_ids.items()})
    say(step="asking whether the publisher is trusted")
    try:
        overview = api.get_organization_overview(sources.ORGANISATION)
        say(trusted=bool(getattr(overview, "trustedKernelPublisher", False)))
    except Exception as error:  # kernels takes every failure of this question for a no
        say(trusted=None, untold=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if quiet:  # kernels names itself with an empty user agent then, which no request survives
        say(step=HEADERS)
        from kernels.hf_hub import _get_hf_api

        with suppress(RepositoryNotFoundError):
            _get_hf_api().list_repo_refs(next(iter(repo_ids.values())), repo_type=KERNEL)


def _head(api: Any, repo_id: str) -> str | None:
    """Return the commit of the version, None where there is no such repository or version."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    from kernels_ext_npu import sources
    from kernels_ext_npu.distribution import published

    try:
        return published.head(api, repo_id, sources.VERSION)
    except published.VersionNotFoundError:
        return None
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401 and get_token() is not None:
            raise  # without a token the Hub answers 401 where there is no repository, with one that it is refused
        return None
