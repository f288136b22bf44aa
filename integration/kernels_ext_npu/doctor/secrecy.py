"""Keeps tokens and passwords out of whatever doctor prints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
_URLS = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
_NAME = re.compile(
    r"(?!TOKENIZERS)(?!.*_(PATH|FILE|DIR)$).*(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY)",
    re.IGNORECASE,
)
_SHORTEST = 4  # a shorter one would be found within ordinary words
_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9_]{4,}|\bhf_oauth_[\w.-]+|(?<=[Bb]earer )\S+")
_QUERY = re.compile(r"(?<=[?&])((?:token|password|passwd|secret|key|sig|signature)=)[^&\s'\"]+", re.IGNORECASE)


def hide(value: Any) -> Any:
    """Return the same value, with every secret of this process in its strings replaced."""
    return _hide(value, sorted(set(_secrets()), key=len, reverse=True))


def _hide(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        value = _USER.sub(f"{HIDDEN}@", value)
        return _QUERY.sub(rf"\1{HIDDEN}", _TOKEN.sub(HIDDEN, value))
    if isinstance(value, dict):
        return {_hide(key, secrets): _hide(entry, secrets) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide(entry, secrets) for entry in value]
    return value


def _secrets() -> Iterator[str]:
    """Find the values of variables that are called like secrets, and secrets in the URLs that are used.

    These stand before the host.
    """
    for name, value in os.environ.items():
        settings = {"true", "false", "none", "auto"}
        if _NAME.match(name) and len(value) >= _SHORTEST and value.lower() not in settings:
            yield value.strip()
        if name.upper() in _URLS:
            for url in value.split():
                before = url.partition("://")[2].rpartition("@")[0]
                password = before.partition(":")[2]
                # a password that is not quoted as it should be is cut at these when somebody reads the URL
                for part in (before, password, *re.split("[/:@?#]", password)):
                    if len(part) >= _SHORTEST:
                        yield from (part, unquote(part))
