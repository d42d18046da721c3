"""Accepts the writers of one path: one thread that accepts, one thread for each connection."""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from kv_transport.connection import WriterConnection
from kv_transport.path_options import PathOptions
from kv_transport.reception import Reception
from kv_transport.thread_group import ThreadGroup

_log = logging.getLogger(__name__)

BACKLOG = 128
_ACCEPT_PAUSE_S = 0.1

ServeWriter = Callable[[socket.socket, Any], WriterConnection]
"""Makes the connection for an accepted socket and the address that `accept` gave with it."""


class WriterAcceptor:
    """Takes over a listening, non-blocking socket. `stop` may be called from any thread, all else from the loop."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        reception: Reception,
        options: PathOptions,
        serve: ServeWriter,
    ) -> None:
        self._listener = listener
        self._reception = reception
        self._threads = ThreadGroup(asyncio.get_running_loop())
        self._options = options
        self._serve = serve
        self._lock = threading.Lock()
        self._connections: set[WriterConnection] = set()
        self._is_closing = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._threads.start(f"kv-accept-{name}", self._accept_writers)

    @property
    def connections(self) -> list[WriterConnection]:
        """Those that are open now."""
        with self._lock:
            return list(self._connections)

    def stop(self) -> None:
        """Accepts nobody any more and cuts every connection; the threads are about to end."""
        with self._lock:
            self._is_closing = True
            connections = list(self._connections)
        self._wake_writer.close()  # the end of its stream is what wakes the thread that accepts
        for connection in connections:
            connection.cut("the receiver is being closed")

    async def join(self) -> None:
        """Returns when no thread is left. Raises TransferError when one does not leave."""
        await self._threads.join(self._options.leave_s)

    def _accept_writers(self) -> None:
        with self._listener, self._wake_reader, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._is_closing:
                selector.select()
                if not self._is_closing:
                    self._accept()

    def _accept(self) -> None:
        try:
            sock, where = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptors left, or the peer is gone again
            _log.warning("KV receiver could not accept a connection: %s", error)
            self._pause(_ACCEPT_PAUSE_S)
            return
        sock.setblocking(True)
        connection = self._serve(sock, where)
        with self._lock:
            is_welcome = not self._is_closing and len(self._connections) < self._options.max_connections
            if is_welcome:
                self._connections.add(connection)
        if not is_welcome:
            sock.close()
            self._reception.count("kv_connections_refused", 1)
            _log.warning(
                "KV connection from %s refused: %d are open", connection.address, self._options.max_connections
            )
            return
        self._threads.start(f"kv-receive-{connection.address}", lambda: self._run(connection))

    def _run(self, connection: WriterConnection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _pause(self, duration_s: float) -> None:
        """Waits, unless `stop` is called."""
        self._wake_reader.settimeout(duration_s)
        try:
            self._wake_reader.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return
