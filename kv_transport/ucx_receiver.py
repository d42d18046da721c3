"""The receiving side of the path "ucx"."""

from __future__ import annotations

import socket

from kv_transport.dialing import listen_on
from kv_transport.receiver import PoolReceiver
from kv_transport.reception import Reception
from kv_transport.socket_listener import SocketListener
from kv_transport.tcp_sockets import tune
from kv_transport.ucx import CONTROL_KIND, DEFAULT_OPTIONS, PATH, UcxOptions
from kv_transport.ucx_connection import UcxConnection
from kv_transport.ucx_library import load_ucx
from kv_transport.ucx_settings import ucx_settings
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.address import format_address
from pd_rpc.wire import PeerIdentity


class UcxListener(SocketListener):
    """PathListener of a pool: control connections come in at `host` and a free port; UCX takes another one there.

    identity, secret: see SocketListener
    Raises ConfigError when ucxx is not there, or no interface of this host has that address.
    """

    def __init__(
        self,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        host: str,
        options: UcxOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__(memory, identity, secret, CONTROL_KIND, options)
        self._memory = memory
        self._ucx_options = options
        self._host = host
        self._port = 0
        self._library = load_ucx()
        self._settings = ucx_settings(host)

    @property
    def address(self) -> TransportAddress:
        """Known after `start`."""
        self._require_started()
        return TransportAddress(PATH, self._host, self._port)

    async def start(self, reception: Reception) -> None:
        """Binds and listens. Raises ConfigError naming host:port when that cannot be."""
        listener = await listen_on(self._host, 0)
        self._port = listener.getsockname()[1]

        def serve(sock: socket.socket, where: tuple[str, int]) -> UcxConnection:
            address, options = format_address(*where[:2]), self._ucx_options
            return UcxConnection(
                sock, address, self._memory, reception, options, self._authenticate, self._library, self._settings
            )

        self._accept(str(self._port), listener, reception, serve)

    def _authenticate(self, sock: socket.socket) -> None:
        tune(sock, self._ucx_options)
        super()._authenticate(sock)


class UcxBlockReceiver(PoolReceiver):
    """BlockReceiver over UCX alone. See UcxListener."""

    def __init__(
        self,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        host: str,
        options: UcxOptions = DEFAULT_OPTIONS,
    ) -> None:
        listener = UcxListener(memory, identity, secret, host=host, options=options)
        super().__init__(memory, [listener], grace_s=options.grace_s, leave_s=options.leave_s)
