"""Plan which requests go wrong and how, and log all of them."""

import fnmatch
import threading
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["refuse", "delay", "cut", "lose", "truncate", "status"]


@dataclass
class Fault:
    """Plan a failure for the requests `at`, `at` + 1, ... `at` + `times` - 1 of those that match `method` and `path`.

    Requests count from when the fault is added: `seen` have come. `path` is a pattern of fnmatch over the decoded path.
    Kinds:

    - refuse: reset the connection and do nothing.
    - delay: do as asked, `seconds` late.
    - cut: close the connection before the request takes effect.
    - lose: let the request take effect, then close the connection without an answer.
    - truncate: let it take effect, and close after `size` bytes of the answer's body, at the latest before its last.
    - status: answer `status`, without effect, or after it where `applied`.
    """

    kind: Kind
    method: str = "*"
    path: str = "*"
    at: int = 1
    times: int = 1
    seconds: float = 0.0
    size: int = 0
    status: int = 503
    applied: bool = False
    seen: int = 0

    def __post_init__(self) -> None:
        assert self.kind in get_args(Kind)

    def is_due(self, method: str, path: str) -> bool:
        """Count a request, if it matches, and tell whether it fails."""
        matches = self.method in ("*", method) and fnmatch.fnmatchcase(path, self.path)
        self.seen += matches
        return matches and self.at <= self.seen < self.at + self.times


@dataclass
class LoggedRequest:
    """Describe a request: without an answer `status` is None; `authorized` says whether a token came, not which."""

    method: str
    path: str
    authorized: bool
    status: int | None = None
    fault: str | None = None


class Faults:
    """Keep the faults that are planned and the requests that were seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[Fault] = []
        self.requests: list[LoggedRequest] = []

    def add(self, kind: Kind, **fields: Any) -> None:
        self._planned.append(Fault(kind, **fields))

    def clear(self) -> None:
        self._planned.clear()

    def take(self, method: str, path: str, authorized: bool) -> tuple[LoggedRequest, Fault | None]:
        """Log a request, count it, and return the first fault that is due."""
        with self._lock:
            due = [fault for fault in self._planned if fault.is_due(method, path)]
            request = LoggedRequest(method, path, authorized, fault=due[0].kind if due else None)
            self.requests.append(request)
        return request, due[0] if due else None
