"""The receiving side of the path "tcp"."""

from __future__ import annotations

import asyncio
import socket

from kv_transport.connection import WriterConnection
from kv_transport.pairing import check_identity, check_peer
from kv_transport.receiver import PoolReceiver
from kv_transport.reception import Reception
from kv_transport.tcp import DATA_KIND, DEFAULT_OPTIONS, PATH, TcpOptions
from kv_transport.tcp_connection import TcpConnection
from kv_transport.tcp_sockets import size_buffers, tune
from kv_transport.writer_acceptor import BACKLOG, WriterAcceptor
from pd_core.errors import ConfigError, InvalidTransition
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.address import format_address
from pd_rpc.blocking import authenticate_blocking_as_server
from pd_rpc.wire import PeerIdentity


class TcpListener:
    """PathListener of a pool on `host`:`port` and on no other address.

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
        self._acceptor: WriterAcceptor | None = None

    @property
    def address(self) -> TransportAddress:
        """Known after `start`."""
        if self._acceptor is None:
            raise InvalidTransition("the receiver has not been started")
        return TransportAddress(PATH, self._advertise_host, self._port)

    @property
    def connections(self) -> list[WriterConnection]:
        return self._acceptor.connections if self._acceptor else []

    async def start(self, reception: Reception) -> None:
        """Binds and listens. Raises ConfigError naming host:port when that cannot be."""
        listener = await self._listen(asyncio.get_running_loop())
        self._port = listener.getsockname()[1]

        def serve(sock: socket.socket, where: tuple[str, int]) -> TcpConnection:
            address = format_address(*where[:2])
            return TcpConnection(sock, address, self._memory, reception, self._options, self._authenticate)

        self._acceptor = WriterAcceptor(str(self._port), listener, reception, self._options, serve)

    def stop(self) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()

    async def join(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.join()

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
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ConfigError(f"KV receiver cannot listen on {address}: {error}") from error
        return listener

    def _authenticate(self, sock: socket.socket) -> None:
        tune(sock, self._options)
        authenticate_blocking_as_server(
            sock,
            self._secret,
            self._identity,
            kind=DATA_KIND,
            deadline_s=self._options.handshake_s,
            check_peer=check_peer,
        )


class TcpBlockReceiver(PoolReceiver):
    """BlockReceiver over tcp alone. See TcpListener."""

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
        listener = TcpListener(
            memory, identity, secret, host=host, port=port, advertise_host=advertise_host, options=options
        )
        super().__init__(memory, [listener], grace_s=options.grace_s, leave_s=options.leave_s)
