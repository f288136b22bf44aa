"""Serve a Hub in threads of this process, and let requests go wrong as they are planned to."""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.localhub.answers import REGISTRY, Answer, Request, Settings, answer
from tests.localhub.faults import Fault, Faults, LoggedRequest
from tests.localhub.store import Store

MESSAGES = {
    409: "A conflicting operation is in progress",
    412: "A commit has happened since. Please refresh and try again.",
    429: "Too Many Requests",
    500: "Internal Error - We're working hard to fix this as soon as possible!",
    503: "Service Unavailable",
}


class Connection(http.server.BaseHTTPRequestHandler):
    """Answer what comes by one connection, request by request, or close it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # what is written goes out together, when the request is over
    server: Server

    def serve(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        hub = self.server.hub
        request = Request(hub.store, hub.settings, hub.url, self.command, self.headers, parse_qs(query), body)
        if path.startswith(REGISTRY):
            self.send(answer(request, path))
            return
        decoded = unquote(path)
        logged, fault = hub.faults.take(self.command, decoded, "authorization" in self.headers)
        if fault is None:
            self.send(answer(request, path), logged)
        elif fault.kind == "delay":
            if not self.server.stops.wait(fault.seconds):
                self.send(answer(request, path), logged)
        elif fault.kind == "status":
            if fault.applied:
                answer(request, path)
            self.send(refusal(fault, decoded), logged)
        else:
            made = answer(request, path) if fault.kind in ("lose", "truncate") else Answer(b"")
            if fault.kind == "truncate" and made.content and self.command != "HEAD":
                self.send(made, logged, min(fault.size, len(made.content) - 1))
            if fault.kind == "refuse":  # the connection is reset, not closed
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_DELETE = serve  # noqa: N815  as the standard library calls them

    def send(self, made: Answer, logged: LoggedRequest | None = None, size: int | None = None) -> None:
        """Send an answer at once, or some bytes of its content alone."""
        self.send_response(made.status)
        for name, value in ({"Content-Length": str(len(made.content))} | made.headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else made.content[:size])
        if logged is not None:
            logged.status = made.status

    def log_message(self, *_: object) -> None:
        """Write nothing to the streams of the tests."""


def refusal(fault: Fault, path: str) -> Answer:
    message = MESSAGES.get(fault.status, "a planned fault")
    if (fault.status, path) == (409, "/api/repos/create"):
        message = "Cannot create repo: another conflicting operation is in progress"
    headers = {"Content-Type": "text/plain", "X-Error-Message": message}
    if fault.status in (429, 503):
        headers["Retry-After"] = "0"
    return Answer(message.encode(), fault.status, headers)


class Server(http.server.ThreadingHTTPServer):
    """Keep the connections, so that they end with it, and those too that wait for a late answer."""

    daemon_threads = False  # they are waited for

    def __init__(self, hub: LocalHub) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.hub = hub
        self.stops = threading.Event()
        self.open: set[socket.socket] = set()

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *connection: Any) -> None:
        """Let go of a client that was killed or has given up; print whatever else goes wrong."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*connection)

    def stop(self) -> None:
        self.stops.set()
        self.shutdown()
        for connection in list(self.open):
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class LocalHub:
    """Serve a Hub at `url`; a context manager.

    `settings`, `store`, `faults` and `requests`, the log, may be used while it runs.
    """

    def __init__(self) -> None:
        self.settings = Settings()
        self.store = Store()
        self.faults = Faults()

    @property
    def requests(self) -> list[LoggedRequest]:
        return self.faults.requests

    def __enter__(self) -> LocalHub:
        self._server = Server(self)
        self.url = "http://{}:{}".format(*self._server.server_address)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="localhub", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop()
        self._thread.join()

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of processes whose Hub this is: with a token, and with their caches in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "KERNELS_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": self.settings.token or "hf_of_the_tests",
            "NO_PROXY": "127.0.0.1",
        }

    def publish(self, repo_id: str, files: dict[str, bytes], branch: str = "v1") -> str:
        """Commit files to a branch of a kernel repository, which are made if they are not there; return the commit."""
        known = self.store.repositories.get(("kernels", repo_id))
        repository = known or self.store.create("kernels", repo_id)
        if branch not in repository.refs()["branches"]:
            repository.create_branch(branch, "main")
        return repository.add(branch, [(path, self.store.add_file(content)) for path, content in files.items()]).id
