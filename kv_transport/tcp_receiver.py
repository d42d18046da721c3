"""The receiving side of the path "tcp": one thread that accepts, one thread for each connection."""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import threading
from collections.abc import Callable

from kv_transport.interface import ReceiverEvent
from kv_transport.reception import Reception
from kv_transport.tcp import DATA_KIND, DEFAULT_OPTIONS, PATH, TcpOptions, check_identity, check_peer
from kv_transport.tcp_connection import WriterConnection
from kv_transport.tcp_sockets import size_buffers
from kv_transport.thread_group import ThreadGroup
from pd_core.errors import ConfigError, InvalidTransition
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TicketRef, TransportAddress
from pd_rpc.address import format_address
from pd_rpc.blocking import authenticate_blocking_as_server
from pd_rpc.wire import PeerIdentity

_log = logging.getLogger(__name__)

_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.1


class TcpBlockReceiver:
    """BlockReceiver of a pool on `host`:`port` and on no other address.

    identity:       ours; its fingerprint is what writers must have too
    secret:         the cluster's
    port:           0 takes a free one
    advertise_host: what writers are told, when it is not `host`
    Raises ConfigError when `identity` does not describe `memory`.
    """

    def __init__(
        self,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        host: str,
        port: int = 0,
        advertise_host: str | None = None,
        options: TcpOptions = DEFAULT_OPTIONS,
    ) -> None:
        check_identity(memory, identity)
        self._memory = memory
        self._identity = identity
        self._secret = secret
        self._host = host
        self._port = port
        self._advertise_host = advertise_host or host
        self._options = options
        self._lock = threading.Lock()
        self._connections: set[WriterConnection] = set()
        self._is_closing = False
        self._running: _Running | None = None

    @property
    def addresses(self) -> list[TransportAddress]:
        """The one address; known after `start`."""
        return [TransportAddress(PATH, self._advertise_host, self._started.port)]

    @property
    def reception(self) -> Reception:
        """Permits and counters; for tests and for /debug."""
        return self._started.reception

    async def start(self) -> None:
        """Binds and listens. Raises ConfigError naming host:port when that cannot be."""
        if self._running is not None:
            raise InvalidTransition("the receiver has been started already")
        loop = asyncio.get_running_loop()
        listener = await self._listen(loop)
        reception = Reception(self._memory, loop, self._options.grace_s, self._options.leave_s)
        self._running = _Running(listener, reception, ThreadGroup(loop))
        self._running.threads.start(f"kv-accept-{self._running.port}", self._accept_writers)

    def open_ticket(self, ticket: Ticket, on_event: Callable[[ReceiverEvent], None]) -> None:
        self._started.reception.open_ticket(ticket, on_event)

    async def close_ticket(self, ref: TicketRef) -> None:
        await self._started.reception.close_ticket(ref)

    def counters(self) -> dict[str, float]:
        return self._started.reception.counters()

    async def close(self) -> None:
        """Cuts every connection; returns when no thread is left. Raises TransferError when one does not leave."""
        running = self._running
        if running is None:
            return
        with self._lock:
            self._is_closing = True
            connections = list(self._connections)
        running.stop_accepting()
        for connection in connections:
            connection.cut("the receiver is being closed")
        await running.reception.close()
        await running.threads.join(self._options.leave_s)

    @property
    def _started(self) -> _Running:
        if self._running is None:
            raise InvalidTransition("the receiver has not been started")
        return self._running

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        address = format_address(self._host, self._port)
        try:
            infos = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, where = infos[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ConfigError(f"KV receiver cannot listen on {address}: {error}") from error
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            size_buffers(listener, self._options)
            listener.bind(where)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ConfigError(f"KV receiver cannot listen on {address}: {error}") from error
        return listener

    def _accept_writers(self) -> None:
        running = self._started
        with running.listener, running.wake_reader, selectors.DefaultSelector() as selector:
            selector.register(running.listener, selectors.EVENT_READ)
            selector.register(running.wake_reader, selectors.EVENT_READ)
            while not self._is_closing:
                selector.select()
                if not self._is_closing:
                    self._accept(running)

    def _accept(self, running: _Running) -> None:
        try:
            sock, where = running.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptors left, or the peer is gone again
            _log.warning("KV receiver could not accept a connection: %s", error)
            running.pause(_ACCEPT_PAUSE_S)
            return
        sock.setblocking(True)
        address = format_address(*where[:2])
        connection = WriterConnection(sock, address, self._memory, running.reception, self._options, self._authenticate)
        with self._lock:
            is_welcome = not self._is_closing and len(self._connections) < self._options.max_connections
            if is_welcome:
                self._connections.add(connection)
        if not is_welcome:
            sock.close()
            running.reception.count("kv_connections_refused", 1)
            _log.warning("KV connection from %s refused: %d are open", address, self._options.max_connections)
            return
        running.threads.start(f"kv-receive-{address}", lambda: self._serve(connection))

    def _serve(self, connection: WriterConnection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _authenticate(self, sock: socket.socket) -> None:
        authenticate_blocking_as_server(
            sock,
            self._secret,
            self._identity,
            kind=DATA_KIND,
            deadline_s=self._options.handshake_s,
            check_peer=check_peer,
        )


class _Running:
    """What a started receiver has: the listening socket, a way to wake the thread that accepts, the rest."""

    def __init__(self, listener: socket.socket, reception: Reception, threads: ThreadGroup) -> None:
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self.reception = reception
        self.threads = threads
        self.wake_reader, self._wake_writer = socket.socketpair()

    def pause(self, duration_s: float) -> None:
        """Waits, unless `stop_accepting` is called."""
        self.wake_reader.settimeout(duration_s)
        try:
            self.wake_reader.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return

    def stop_accepting(self) -> None:
        self._wake_writer.close()  # the end of its stream is what wakes the reader
