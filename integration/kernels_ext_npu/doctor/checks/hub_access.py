"""The Hub: can it be reached, does it hold the kernels, and does it trust their publisher."""

from __future__ import annotations

import re
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from kernels_ext_npu.catalogue import REPOSITORIES, in_words
from kernels_ext_npu.distribution.sources import ORGANISATION, VERSION
from kernels_ext_npu.doctor.findings import Finding, explained, not_checked, ok, remedy, warning
from kernels_ext_npu.doctor.observations import Observations, Outcome
from kernels_ext_npu.doctor.probes import HEADERS

STATUS = re.compile(r"\b(?:Client|Server) error '(\d{3})|^\w+: (\d{3}) |\((\d{3})\)|\b(401|403|404|407|429|5\d\d)\b")


def reachable(seen: Observations) -> Finding:
    """Find whether the Hub, or its mirror, answers."""
    outcome, severe = seen.hub, seen.severe
    if unusable := unusable_urls(seen.environment):
        said = f"{', '.join(unusable)}: not a URL that can be used"
        return severe(said, **remedy("no URL", names=" ".join(unusable)))
    if outcome.facts.get("offline"):
        return not_checked("HF_HUB_OFFLINE=1 (or TRANSFORMERS_OFFLINE): nothing is asked")
    if outcome.step == HEADERS and outcome.failure:
        said = f"{_where(seen)} answers, but kernels cannot ask it: {_first(outcome.errors)}"
        return severe(said, **explained(outcome.errors), facts={"errors": outcome.errors})
    if outcome.failure and "endpoint" not in outcome.facts:
        return not_checked(f"{outcome.cause}: see huggingface-hub above")
    if outcome.failure and "versions" not in outcome.facts:
        said, case = _failure(outcome)
        errors = {"errors": outcome.errors, "failure": outcome.failure}
        return severe(f"{_where(seen)} {said}", **remedy(case), facts=errors)
    versions = outcome.facts["versions"]
    missing = [name for name, commit in versions.items() if commit is None]
    if missing:
        names = f"the {in_words()} kernels" if len(missing) == len(REPOSITORIES) else ", ".join(missing)
        return severe(
            f"{_where(seen)} answers, but has no version {VERSION} of {names}",
            details=("a mirror has to serve repositories of the type kernel",),
            **remedy("no kernels on the Hub"),
            facts={"versions": versions},
        )
    return ok(f"{_where(seen)} answers and has the {in_words()} kernels", facts=outcome.facts)


def asked(seen: Observations) -> dict[str, Any]:
    """Return which Hub was asked, and through which proxy."""
    endpoint = seen.hub.facts.get("endpoint")
    return {} if unusable_urls(seen.environment) else {"endpoint": endpoint, "proxy": _proxy(endpoint)}


def publisher(seen: Observations) -> Finding:
    """Find whether `kernels` trusts the publisher: it loads other code only of repositories that are named to it."""
    found = seen.hub.facts
    if "trusted" not in found:
        return not_checked(
            "offline, kernels does not ask either" if found.get("offline") else "the Hub could not be asked"
        )
    if found["trusted"]:
        return ok(f"{ORGANISATION} is trusted by the Hub")
    repo_id = f"{ORGANISATION}/{REPOSITORIES[0]}"
    told = found["trusted"] is not None
    return warning(
        f"{ORGANISATION} is {'not trusted by the Hub' if told else 'trusted or not: the Hub does not say'}",
        details=() if told else (found["untold"],),
        **remedy(f"publisher not {'trusted' if told else 'told'}", repo_id=repo_id, version=VERSION),
        facts={"trusted": found["trusted"]},
    )


def unusable_urls(environment: dict[str, str]) -> list[str]:
    """Find variables that are meant to be URLs and are none.

    Their values are not told: a password may be what is wrong with one.
    """
    names = [name for name in environment if name.upper() in ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")]
    return [name for name in names if environment[name] and not _is_url(environment[name])]


def _is_url(value: str) -> bool:
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")  # a proxy may be host:port
        return bool(parts.hostname) and parts.port != 0 and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        return False


def _failure(outcome: Outcome) -> tuple[str, str]:
    """Return what is said of a request that failed, and the case that it is."""
    errors = " ".join(outcome.errors)
    match = STATUS.search(errors)
    status = int(next(group for group in match.groups() if group)) if match else 0
    if outcome.hung or "Timeout" in errors:
        return "does not answer in time", "Hub out of reach"
    if status == 401:
        return "refuses the token: 401", "Hub refuses the token"
    if status == 407:
        return "the proxy wants a login: 407", "proxy wants a login"
    if status >= 500 or status == 429:
        return f"answers {status}: it is overloaded or down", "Hub overloaded"
    if "CERTIFICATE_VERIFY_FAILED" in errors:
        return "shows a certificate that is not trusted here, as proxies that look into connections do", "certificate"
    if "JSONDecodeError" in errors or "Expecting value" in errors:
        return "answers, but not as a Hub does", "no Hub"
    return f"cannot be reached: {_first(outcome.errors) or outcome.failure}", "Hub out of reach"


def _where(seen: Observations) -> str:
    endpoint = seen.hub.facts.get("endpoint")
    proxy = _proxy(endpoint)
    return f"{endpoint or 'the Hub'}{f' through the proxy {proxy}' if proxy else ''}"


def _proxy(endpoint: str | None) -> str | None:
    """Return the proxy that is used for an endpoint."""
    parts = urlsplit(endpoint or "")
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def _first(errors: tuple[str, ...]) -> str:
    return errors[0].splitlines()[0] if errors else ""
