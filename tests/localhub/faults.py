"""Let requests go wrong on demand, and log all of them."""

import asyncio
import fnmatch
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# fetched by clients once a day on their own: counted, it would move the numbers of all other requests
REGISTRY = "/api/agent-harnesses"
KINDS = ("refuse", "delay", "cut", "lose", "truncate", "status")
MESSAGES = {
    409: "Cannot create repo: another conflicting operation is in progress",
    412: "A commit has happened since. Please refresh and try again.",
    429: "Too Many Requests",
    500: "Internal Error - We're working hard to fix this as soon as possible!",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Fault:
    """Plan a failure for the requests `at`, `at` + 1, ... `at` + `times` - 1 of those that match `method` and `path`.

    Requests count from when the fault is added. `path` is a pattern of fnmatch over the decoded path. Kinds:

    - refuse: reset the connection and do nothing.
    - delay: do as asked, `seconds` late.
    - cut: close the connection before the request takes effect.
    - lose: let the request take effect, then close the connection without an answer.
    - truncate: let it take effect, and close after `size` bytes of the answer's body, at the latest before its last.
    - status: answer `status` with `Retry-After: retry_after`, without effect, or after it where `applied`.
    """

    kind: str
    method: str = "*"
    path: str = "*"
    at: int = 1
    times: int = 1
    seconds: float = 0.0
    size: int = 0
    status: int = 503
    retry_after: int | None = None
    applied: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault is called {self.kind!r}; there are {', '.join(KINDS)}")
        if self.at < 1 or self.times < 1:
            raise ValueError(f"requests are counted from 1: at={self.at}, times={self.times}")

    def matches(self, method: str, path: str) -> bool:
        return self.method in ("*", method) and fnmatch.fnmatchcase(path, self.path)


@dataclass
class LoggedRequest:
    """Describe a request: without an answer `status` is None; `authorized` says whether a token came, not which."""

    number: int
    method: str
    path: str
    query: str
    authorized: bool
    status: int | None = None
    fault: str | None = None


class Faults:
    """Keep the faults that are planned and the requests that were seen; any thread may call every method."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.planned: list[tuple[Fault, list[int]]] = []
        self.requests: list[LoggedRequest] = []

    def add(self, kind: str, **fields: Any) -> Fault:
        fault = Fault(kind, **fields)
        with self.lock:
            self.planned.append((fault, [0]))
        return fault

    def clear(self) -> None:
        with self.lock:
            self.planned.clear()

    def take(self, method: str, path: str, query: str, authorized: bool) -> tuple[LoggedRequest, Fault | None]:
        """Log a request, count it, and return the first fault that is due."""
        with self.lock:
            request = LoggedRequest(len(self.requests) + 1, method, path, query, authorized)
            self.requests.append(request)
            due = None
            for fault, count in self.planned:
                if fault.matches(method, path):
                    count[0] += 1
                    if due is None and fault.at <= count[0] < fault.at + fault.times:
                        due = fault
            request.fault = due.kind if due is not None else None
            return request, due


class FaultyApp:
    """Log the requests of another ASGI application, and let those fail that are planned to."""

    def __init__(self, app: Callable, faults: Faults) -> None:
        self.app, self.faults = app, faults

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["path"].startswith(REGISTRY):
            await self.app(scope, receive, send)
            return
        request, fault = self.faults.take(
            scope["method"],
            scope["path"],
            scope["query_string"].decode(),
            any(name == b"authorization" for name, _ in scope["headers"]),
        )
        transport: asyncio.Transport = scope["transport"]

        async def answer(message: dict) -> None:
            request.status = message.get("status", request.status)
            await send(message)

        if fault is None:
            await self.app(scope, receive, answer)
        elif fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
            await self.app(scope, receive, answer)
        elif fault.kind == "refuse":
            await self.read(receive)
            await self.disconnect(transport, receive, reset=True)
        elif fault.kind == "cut":
            await self.read(receive)
            await self.disconnect(transport, receive)
        elif fault.kind == "status":
            await (self.run(scope, receive) if fault.applied else self.read(receive))
            await self.answer_status(fault, scope["path"], answer)
        else:
            start, body = await self.run(scope, receive)
            if fault.kind == "lose" or not body:
                await self.disconnect(transport, receive)
            else:
                await answer(start)
                part = body[: min(fault.size, len(body) - 1)]
                await answer({"type": "http.response.body", "body": part, "more_body": True})
                transport.close()
                await self.disconnected(receive)

    async def read(self, receive: Callable) -> None:
        """Read all of the request: a client that is still writing notices a lost connection in several ways."""
        while (await receive()).get("more_body"):
            pass

    async def run(self, scope: dict, receive: Callable) -> tuple[dict, bytes]:
        """Run the application, and keep its answer."""
        messages: list[dict] = []

        async def keep(message: dict) -> None:
            messages.append(message)

        await self.app(scope, receive, keep)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return messages[0], b"" if scope["method"] == "HEAD" else body

    async def answer_status(self, fault: Fault, path: str, answer: Callable) -> None:
        message = MESSAGES.get(fault.status, "a planned fault")
        if fault.status == 409 and path != "/api/repos/create":
            message = "A conflicting operation is in progress"
        headers = [
            (b"content-type", b"text/plain"),
            (b"content-length", str(len(message)).encode()),
            (b"x-error-message", message.encode()),
        ]
        retry_after = 0 if fault.retry_after is None and fault.status in (429, 503) else fault.retry_after
        if retry_after is not None:
            headers.append((b"retry-after", str(retry_after).encode()))
        await answer({"type": "http.response.start", "status": fault.status, "headers": headers})
        await answer({"type": "http.response.body", "body": message.encode()})

    async def disconnect(self, transport: asyncio.Transport, receive: Callable, reset: bool = False) -> None:
        if reset:
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()
        await self.disconnected(receive)

    async def disconnected(self, receive: Callable) -> None:
        """Wait for the end of the connection: the server answers for an application that ends before it."""
        while (await receive())["type"] != "http.disconnect":
            pass
