"""The receiving side of the path "tcp"."""

from __future__ import annotations

import asyncio
import socket

from kv_transport.receiver import PoolReceiver
from kv_transport.reception import Reception
from kv_transport.socket_listener import SocketListener
from kv_transport.tcp import DATA_KIND, DEFAULT_OPTIONS, PATH, TcpOptions
from kv_transport.tcp_connection import TcpConnection
from kv_transport.tcp_sockets import size_buffers, tune
from kv_transport.writer_acceptor import BACKLOG
from pd_core.errors import ConfigError
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.address import format_address
from pd_rpc.wire import PeerIdentity


class TcpListener(SocketListener):
    """PathListener of a pool on `host`:`port` and on no other address.

    identity, secret: see SocketListener
    port:             0 takes a free one
    advertise_host:   what writers are told, when it is not `host`
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
        super().__init__(memory, identity, secret, DATA_KIND, options)
        self._memory = memory
        self._tcp_options = options
        self._host = host
        self._port = port
        self._advertise_host = advertise_host or host

    @property
    def address(self) -> TransportAddress:
        """Known after `start`."""
        self._require_started()
        return TransportAddress(PATH, self._advertise_host, self._port)

    async def start(self, reception: Reception) -> None:
        """Binds and listens. Raises ConfigError naming host:port when that cannot be."""
        listener = await self._listen(asyncio.get_running_loop())
        self._port = listener.getsockname()[1]

        def serve(sock: socket.socket, where: tuple[str, int]) -> TcpConnection:
            address = format_address(*where[:2])
            return TcpConnection(sock, address, self._memory, reception, self._tcp_options, self._authenticate)

        self._accept(str(self._port), listener, reception, serve)

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
            size_buffers(listener, self._tcp_options)
            listener.bind(where)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ConfigError(f"KV receiver cannot listen on {address}: {error}") from error
        return listener

    def _authenticate(self, sock: socket.socket) -> None:
        tune(sock, self._tcp_options)
        super()._authenticate(sock)


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
