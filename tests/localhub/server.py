"""Run the server in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import create_app
from .faults import Faults, FaultyApp, LoggedRequest
from .shared import Hub, Settings
from .store import Store


class Protocol(H11Protocol):
    """Tell the application which connection a request came by, so that it can cut it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = functools.partial(with_transport, self.app, transport)


async def with_transport(app: Callable, transport: asyncio.Transport, scope: dict, *channels: Callable) -> None:
    with contextlib.suppress(asyncio.CancelledError):  # of requests that are still delayed when the server stops
        await app(scope | {"transport": transport}, *channels)


class LocalHub:
    """Serve a Hub at `url`; a context manager.

    `settings`, `store`, `faults` and `requests`, the log, may be used while it runs.
    """

    def __init__(self) -> None:
        self.settings = Settings()
        self.store = Store()
        self.faults = Faults()
        app = FaultyApp(create_app(Hub(self.store, self.settings, self.faults)), self.faults)
        config = uvicorn.Config(app, http=Protocol, ws="none", lifespan="off", log_config=None, log_level="error")
        self._server = uvicorn.Server(config)

    @property
    def requests(self) -> list[LoggedRequest]:
        return self.faults.requests

    def __enter__(self) -> LocalHub:
        # with the protocol named: only then asyncio sends small answers at once, 40 ms earlier
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        running = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(running,), name="localhub", daemon=True)
        self._thread.start()
        running.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self._listener.close()

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
        changes = [("add", path, self.store.add_file(content)) for path, content in files.items()]
        return repository.add(branch, "published", "", changes)[0].id

    # ---- in the thread -----------------------------------------------------------------------------------------------
    def _run(self, running: threading.Event) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve(running))

    async def _serve(self, running: threading.Event) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        running.set()
        await self._server.serve(sockets=[self._listener])

    def _stop(self) -> None:
        assert self._task is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._task.cancel()
