"""The server: a thread of its own, a port that stays the same, and a listener that can go away."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import create_app
from .faults import Faults, FaultyApp
from .shared import Hub, Settings
from .store import Store


class Protocol(H11Protocol):
    """Tells the application which connection a request came by, so that it can cut it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = functools.partial(with_transport, self.app, transport)


async def with_transport(app: Callable, transport: asyncio.Transport, scope: dict, *channels: Callable) -> None:
    await app(scope | {"transport": transport}, *channels)


class LocalHub:
    """A Hub at `url` that keeps its repositories in the folder `root`; a context manager, or `start` and `stop`.

    `settings`, `store` and `faults` may be used while it runs. The same root can be served again, by one at a time.
    """

    def __init__(self, root: Path, port: int = 0) -> None:
        self.root = Path(root)
        self.settings = Settings()
        self.store = Store(self.root)
        self.faults = Faults()
        app = FaultyApp(create_app(Hub(self.store, self.settings, self.faults)), self.faults, self._go_away)
        self._config = uvicorn.Config(app, http=Protocol, ws="none", lifespan="off", log_config=None)
        self._address = "127.0.0.1", port
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://{self._address[0]}:{self._address[1]}"

    def __enter__(self) -> LocalHub:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> LocalHub:
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = (self.root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"another server has {self.root}") from None
        # bound but not listening: nobody else gets the port while nobody listens
        self._reserved = self._bound()
        self._address = self._reserved.getsockname()
        self._loop = asyncio.new_event_loop()
        self._stopped, self._away_until = False, 0.0
        listener = self._listener()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="localhub", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self._reserved.close()
        self._lock.close()

    def environment(self, home: Path) -> dict[str, str]:
        """For processes whose Hub this is: they have a token, and their caches are in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "KERNELS_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": self.settings.token or "hf_of_the_tests",
            "NO_PROXY": "127.0.0.1",
        }

    # ---- in the thread -----------------------------------------------------------------------------------------------
    def _run(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(listener))
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        self._wake = asyncio.Event()
        while not self._stopped:
            self._server = uvicorn.Server(self._config)
            await self._server.serve(sockets=[listener])
            while not self._stopped and (left := self._away_until - self._loop.time()) > 0:
                await asyncio.wait([asyncio.ensure_future(self._wake.wait())], timeout=left)
            if not self._stopped:
                listener = self._listener()

    def _go_away(self, seconds: float) -> None:
        """Nobody listens for that time, and all connections are cut."""
        self._away_until = self._loop.time() + seconds
        self._close()

    def _stop(self) -> None:
        self._stopped = True
        self._close()

    def _close(self) -> None:
        server = self._server
        assert server is not None
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = server.force_exit = True
        self._wake.set()

    def _bound(self) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(self._address)
        return bound

    def _listener(self) -> socket.socket:
        listener = self._bound()
        listener.listen()
        return listener
