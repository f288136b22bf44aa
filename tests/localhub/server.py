"""Serve a Hub in threads of this process, and let requests go wrong as they are planned to."""

from __future__ import annotations

import http.server
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from tests.localhub.answers import Answer, Request, answer
from tests.localhub.faults import Fault, Faults, LoggedRequest
from tests.localhub.store import Store

# fetched by clients once a day on their own: counted, it would move the numbers of all other requests
REGISTRY = "/api/agent-harnesses"


class Connection(http.server.BaseHTTPRequestHandler):
    """Answer what comes by one connection, request by request, or close it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # what is written goes out together, when the request is over
    server: Server

    def serve(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if path.startswith(REGISTRY):
            self.send(Answer(status=404))
            return
        hub = self.server.hub
        request = Request(hub, hub.url, self.command, self.headers, dict(parse_qsl(query)), body)
        logged, fault = hub.faults.take(self.command, unquote(path), "authorization" in self.headers)
        if fault is not None and fault.kind == "delay":
            time.sleep(fault.seconds)
        made = Answer()
        if fault is None or fault.kind in ("delay", "lose", "truncate") or fault.applied:
            with hub.lock:
                made = answer(request, path)
        if fault is None or fault.kind == "delay":
            self.send(made, logged)
        elif fault.kind == "status":
            self.send(refusal(fault), logged)
        else:
            self.close_connection = True
            if fault.kind == "truncate" and made.content and self.command != "HEAD":
                self.send(made, logged, min(fault.size, len(made.content) - 1))
            if fault.kind == "refuse":  # the connection is reset, not closed
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    do_GET = do_HEAD = do_POST = do_DELETE = serve  # noqa: N815  as the standard library calls them

    def send(self, made: Answer, logged: LoggedRequest | None = None, size: int | None = None) -> None:
        """Send an answer at once, or some bytes of its content alone."""
        self.send_response(made.status)
        for name, value in {"Content-Length": str(len(made.content)), **made.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else made.content[:size])
        if logged is not None:
            logged.status = made.status

    def log_message(self, *_: object) -> None:
        """Write nothing to the streams of the tests."""


def refusal(fault: Fault) -> Answer:
    message = "a planned fault"
    later = {"Retry-After": "0"} if fault.status in (429, 503) else {}
    return Answer(message.encode(), fault.status, {"Content-Type": "text/plain", "X-Error-Message": message, **later})


class Server(http.server.ThreadingHTTPServer):
    """Give each connection a thread, which nobody waits for."""

    hub: LocalHub

    def handle_error(self, *connection: Any) -> None:
        """Let go of a client that was killed or has given up; print whatever else goes wrong."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*connection)


class LocalHub(Store):
    """Serve what it holds at `url`; a context manager. All of it may be used while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = Faults()
        self.lock = threading.Lock()  # one answer after the other

    @property
    def requests(self) -> list[LoggedRequest]:
        return self.faults.requests

    def __enter__(self) -> LocalHub:
        self._server = Server(("127.0.0.1", 0), Connection)
        self._server.hub = self
        self.url = "http://{}:{}".format(*self._server.server_address)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of processes whose Hub this is: with a token, and with their caches in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "KERNELS_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_of_the_tests",
            "NO_PROXY": "127.0.0.1",
        }
