"""The receiving side of the path "tcp"."""

from __future__ import annotations

import socket
import time

from kv_transport.dialing import listen_on
from kv_transport.receiver import PoolReceiver
from kv_transport.reception import Reception
from kv_transport.socket_listener import SocketListener
from kv_transport.sockets import left_s
from kv_transport.tcp import DATA_KIND, DEFAULT_OPTIONS, PATH, TcpOptions
from kv_transport.tcp_connection import TcpConnection
from kv_transport.tcp_sockets import size_buffers, tune
from kv_transport.tcp_stream import DataStream, make_stream
from pd_core.config import check_advertised
from pd_core.errors import ConfigError
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.address import format_address
from pd_rpc.auth import Side
from pd_rpc.tls import Tls
from pd_rpc.wire import PeerIdentity


class TcpListener(SocketListener):
    """PathListener of a pool on `host`:`port` and on no other address.

    identity, secret: see SocketListener
    port:             0 takes a free one
    advertise_host:   what writers are told, when it is not the address that `host` stands for here
    tls:              what both sides show each other first; without, KV can be read on the network
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
        tls: Tls | None = None,
    ) -> None:
        super().__init__(memory, identity, secret, DATA_KIND, options)
        self._memory = memory
        self._tcp_options = options
        self._host = host
        self._port = port
        self._bound_host = host
        self._advertise_host = advertise_host
        self._tls = tls

    @property
    def address(self) -> TransportAddress:
        """Known after `start`."""
        self._require_started()
        return TransportAddress(PATH, self._advertise_host or self._bound_host, self._port)

    async def start(self, reception: Reception) -> None:
        """Binds and listens. Raises ConfigError naming host:port when that cannot be, or transfer.host when writers
        could not be told the address."""
        options = self._tcp_options
        listener = await listen_on(self._host, self._port, lambda sock: size_buffers(sock, options))
        self._bound_host, self._port = listener.getsockname()[:2]
        if self._advertise_host is None:
            try:
                check_advertised(self._bound_host, "transfer.host")
            except ConfigError:
                listener.close()
                raise

        def serve(sock: socket.socket, where: tuple[str, int]) -> TcpConnection:
            address = format_address(*where[:2])
            stream = make_stream(sock, self._tls, Side.SERVER)

            def authenticate(_: socket.socket) -> None:
                tune(sock, self._tcp_options)
                self._prove_on(stream)

            return TcpConnection(sock, stream, address, self._memory, reception, self._tcp_options, authenticate)

        self._accept(str(self._port), listener, reception, serve)

    def _prove_on(self, stream: DataStream) -> None:
        """All within one deadline. Raises KvrelayError or OSError."""
        ends_s = time.monotonic() + self._tcp_options.handshake_s
        stream.begin(left_s(ends_s))
        self._prove(stream.handshake_socket, left_s(ends_s))


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
        tls: Tls | None = None,
    ) -> None:
        listener = TcpListener(
            memory, identity, secret, host=host, port=port, advertise_host=advertise_host, options=options, tls=tls
        )
        super().__init__(memory, [listener], grace_s=options.grace_s, leave_s=options.leave_s)
