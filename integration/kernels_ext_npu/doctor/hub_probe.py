"""A probe that asks the Hub what `kernels` asks it, with its client, and without torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kernels_ext_npu.doctor.probe import note, step

CONNECT, TRUST, HEADERS = "asking the Hub for versions", "asking whether the publisher is trusted", "asking as kernels"


def probe(timeout: float) -> None:
    """Ask the Hub for the kernels and their publisher."""
    step("import huggingface_hub")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import get_session

    from kernels_ext_npu import catalogue, sources

    note(offline=constants.HF_HUB_OFFLINE, endpoint=constants.ENDPOINT, quiet=constants.HF_HUB_DISABLE_TELEMETRY)
    if constants.HF_HUB_OFFLINE:
        return
    get_session().timeout = timeout
    api = HfApi()
    step(CONNECT)
    note(versions={name: _head(api, f"{sources.ORGANISATION}/{name}") for name in catalogue.REPOSITORIES})
    step(TRUST)
    try:
        overview = api.get_organization_overview(sources.ORGANISATION)
        note(trusted=bool(getattr(overview, "trustedKernelPublisher", False)))
    except Exception as error:  # kernels takes every failure of this question for a no
        note(trusted=None, untold=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if constants.HF_HUB_DISABLE_TELEMETRY:
        step(HEADERS)
        _as_kernels(sources.ORGANISATION)


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


def _as_kernels(organisation: str) -> None:
    """Ask the Hub as `kernels` does, which names itself with an empty user agent where telemetry is off."""
    from huggingface_hub.errors import RepositoryNotFoundError
    from kernels.hf_hub import _get_hf_api

    from kernels_ext_npu import catalogue
    from kernels_ext_npu.distribution import published

    with suppress(RepositoryNotFoundError):
        _get_hf_api().list_repo_refs(f"{organisation}/{catalogue.REPOSITORIES[0]}", repo_type=published.KERNEL)
