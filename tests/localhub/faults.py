"""Plan which requests go wrong and how, and log all of them."""

import fnmatch
import threading
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["refuse", "delay", "cut", "lose", "truncate", "status"]


@dataclass(frozen=True)
class Fault:
    """Plan a failure for the requests `at`, `at` + 1, ... `at` + `times` - 1 of those that match `method` and `path`.

    Requests count from when the fault is added. `path` is a pattern of fnmatch over the decoded path. Kinds:

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

    def __post_init__(self) -> None:
        assert self.kind in get_args(Kind)
        assert self.at > 0

    def matches(self, method: str, path: str) -> bool:
        return self.method in ("*", method) and fnmatch.fnmatchcase(path, self.path)


@dataclass
class LoggedRequest:
    """Describe a request: without an answer `status` is None; `authorized` says whether a token came, not which."""

    method: str
    path: str
    authorized: bool
    status: int | None = None
    fault: str | None = None


class Faults:
    """Keep the faults that are planned and the requests that were seen; any thread may call every method."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.planned: list[tuple[Fault, list[int]]] = []
        self.requests: list[LoggedRequest] = []

    def add(self, kind: Kind, **fields: Any) -> None:
        with self.lock:
            self.planned.append((Fault(kind, **fields), [0]))

    def clear(self) -> None:
        with self.lock:
            self.planned.clear()

    def take(self, method: str, path: str, authorized: bool) -> tuple[LoggedRequest, Fault | None]:
        """Log a request, count it, and return the first fault that is due."""
        with self.lock:
            request = LoggedRequest(method, path, authorized)
            self.requests.append(request)
            due = None
            for fault, count in self.planned:
                if fault.matches(method, path):
                    count[0] += 1
                    if due is None and fault.at <= count[0] < fault.at + fault.times:
                        due = fault
            request.fault = due.kind if due is not None else None
            return request, due
