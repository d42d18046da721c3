"""uvicorn inside an event loop that is not its own: no signal handlers, a socket of ours, an end within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from pd_core.errors import ConfigError, KvrelayError
from pd_rpc.address import format_address
from pd_rpc.tasks import BackgroundTasks
from router.faults import Faults
from router.http_connection import HttpLimits, bounded_connection

logger = logging.getLogger(__name__)

STALL_S = 60.0
"""How long a client may leave what we have sent unread before its connection is cut."""
BACKLOG = 1024
SEND_BUFFER_BYTES = 256 * 1024
"""Of the kernel, for each client; by itself it would take megabytes for one that does not read."""


class HttpServer:
    """Serves one ASGI application on one address, from `start` until `stop`.

    on_reply: told the status of replies that the application has no part in
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        faults: Faults,
        on_reply: Callable[[int], None],
        stall_s: float = STALL_S,
        limits: HttpLimits = HttpLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._host = host
        self._port = port
        self._server = _Server(
            uvicorn.Config(
                app,
                http=bounded_connection(limits, stall_s, on_reply),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                proxy_headers=False,
            )
        )
        self._tasks = BackgroundTasks(on_failure=faults.report)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Binds and listens; the address as bound. Raises ConfigError naming host and port when they are not free."""
        sock = await _listen(self._host, self._port)
        host, port, *_ = sock.getsockname()
        self._task = self._tasks.start(self._server.serve(sockets=[sock]), "router:http")
        while not self._server.started:
            await asyncio.sleep(0)
            if self._task.done():
                raise KvrelayError("the HTTP server ended while it started") from self._task.exception()
        return str(host), int(port)

    async def stop(self, grace_s: float) -> None:
        """Stops listening, lets replies end within `grace_s`, then cuts what is left."""
        if self._task is None:
            return
        self._server.exit_soon()
        await asyncio.wait([self._task], timeout=grace_s)
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.wait([self._task], timeout=2.0)
        if self._server.started:
            for listener in self._server.servers:  # uvicorn closes them itself, unless it has broken down
                listener.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    def exit_soon(self) -> None:
        self.should_exit = True
        self._exit.set()

    async def main_loop(self) -> None:
        """Makes the Date header anew every second, and ends at once instead of looking ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that we are a part of."""
        yield


async def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on the first address that `host` stands for."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"router.host {host!r} is no address: {error}", param="router.host") from error
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        is_host = error.errno == errno.EADDRNOTAVAIL
        field, value = ("router.host", host) if is_host else ("router.port", port)
        why = f"{field} {value} cannot be used: {format_address(host, port)}: {error.strerror}; choose another"
        raise ConfigError(why, param=field) from error
    return sock
