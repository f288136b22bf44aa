"""Keeps tokens, passwords, paths and names out of whatever is printed or attached to an issue."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

FORMAT = 1  # the version of a report's JSON
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
_PATH = re.compile(r"(?<![\w.])(?:~|/[\w.+@-]+)(?:/[\w.+@-]+)+/?")


def hide(value: Any) -> Any:
    """Return the same value, with every secret of this process in its strings replaced."""
    secrets = sorted(set(_secrets()), key=len, reverse=True)

    def hidden(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return _QUERY.sub(rf"\1{HIDDEN}", _TOKEN.sub(HIDDEN, _USER.sub(f"{HIDDEN}@", text)))

    return _in_strings(value, hidden)


def anonymous(value: Any) -> Any:
    """Return a value without secrets, paths and names of this machine and its user in its strings."""
    return _in_strings(hide(value), _without_names)


def report_text(head: dict[str, Any], results: Iterable[dict[str, Any]]) -> str:
    """Return a report as JSON, a result a line behind its head, with nothing that tells whose machine it was."""
    head = {"format": FORMAT} | head
    lines = ",\n".join(f"  {json.dumps(result)}" for result in anonymous(list(results)))
    return f'{json.dumps(anonymous(head), indent=1)[:-2]},\n "results": [\n{lines}\n ]\n}}\n'


def _in_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_in_strings(key, change): _in_strings(entry, change) for key, entry in value.items()}
    return [_in_strings(entry, change) for entry in value] if isinstance(value, list | tuple) else value


def _without_names(text: str) -> str:
    text = re.sub(rf"{re.escape(str(Path.home()))}(?!\w)", "~", text)
    text = _PATH.sub(lambda path: f"…/{path[0].rstrip('/').rpartition('/')[2]}", text)
    for own in (platform.node(), _user(), Path.home().name):
        if len(own) > 3 and own != "root":
            text = re.sub(rf"\b{re.escape(own)}\b", HIDDEN, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry for this user
        return ""


def _secrets() -> Iterator[str]:
    """Find the values of variables that are called like secrets, and what stands before the host in URLs."""
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
