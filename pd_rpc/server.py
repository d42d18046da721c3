"""RpcServer: accepts authenticated peers and answers their calls with async generators."""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from pd_core.errors import Overloaded, WorkerLost
from pd_rpc.auth import CONTROL_KIND, NONCE_BYTES, Challenge, Side
from pd_rpc.handshake import CheckPeer
from pd_rpc.limits import DEFAULT_LIMITS, RpcLimits
from pd_rpc.served import CallContext, Handler, ServedConnection, Service
from pd_rpc.server_core import ServerConnection
from pd_rpc.tls import Tls
from pd_rpc.tls_protocol import TlsProtocol
from pd_rpc.wire import PeerIdentity

__all__ = ["CallContext", "Handler", "RpcServer"]

logger = logging.getLogger(__name__)


class RpcServer:
    """One listening socket and its connections; lives on the event loop that `start` runs on.

    handlers:   by type of the call's body, which must be a tagged Struct. A handler is an async generator function;
                it is cancelled (CancelledError inside, or closed at its `yield`) when the caller cancels or leaves and
                when the call's deadline passes. A KvrelayError that it raises travels to the caller; any other
                exception is logged here and reaches the caller as an internal error without details.
    check_peer: called with both identities once a peer has proved itself, before its first call; may refuse it
    tls:        what both sides show each other first; without, everything can be read on the network
    """

    def __init__(
        self,
        identity: PeerIdentity,
        secret: bytes,
        handlers: Mapping[type[msgspec.Struct], Handler],
        *,
        check_peer: CheckPeer | None = None,
        limits: RpcLimits = DEFAULT_LIMITS,
        tls: Tls | None = None,
    ) -> None:
        _check_handlers(handlers)
        self._identity = identity
        self._secret = secret
        self._check_peer = check_peer
        self._limits = limits
        self._tls = tls
        self._service = Service(identity, dict(handlers), limits)
        self._connections: set[ServedConnection] = set()
        self._listener: asyncio.Server | None = None
        self._is_closing = False
        self._make_challenge()  # a bad secret is found here, not with the first peer

    @property
    def num_connections(self) -> int:
        """Authenticated connections."""
        return sum(connection.is_admitted for connection in self._connections)

    @property
    def num_calls(self) -> int:
        """Calls whose handler has not ended."""
        return len(self._service.tasks)

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listens on this one address; (address, port) as bound. Raises OSError when that is not possible."""
        if not host:
            raise ValueError("an address to listen on must be named; all addresses is not a default")
        sock = await _bind(host, port)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._make_link, sock=sock)
        bound_host, bound_port, *_ = sock.getsockname()
        return bound_host, bound_port

    async def close(self, grace_s: float = 1.0) -> None:
        """Stops accepting, cancels all handlers, waits up to `grace_s` for them, closes all connections."""
        self._is_closing = True
        if self._listener is not None:
            self._listener.close()
        reason = f"{self._identity} is shutting down"
        for connection in self._connections:
            connection.stop_calls(reason)
        if self._service.tasks:
            await asyncio.wait(self._service.tasks, timeout=grace_s)
        for task in self._service.tasks:
            logger.error("handler %s does not end %.1f s after its cancellation", task.get_name(), grace_s)
        connections = list(self._connections)
        for connection in connections:
            connection.link.close(WorkerLost(reason))
        for connection in connections:
            await connection.link.wait_lost()
        if self._listener is not None:
            await self._listener.wait_closed()

    def _make_challenge(self) -> Challenge:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Challenge(Side.SERVER, self._secret, self._identity, nonce, kind=CONTROL_KIND)

    def _make_link(self) -> asyncio.Protocol:
        """Called for every accepted socket."""
        # One that is refused lingers until its peer has read why; beyond the second bound it is not told.
        num_unadmitted = sum(not connection.is_admitted for connection in self._connections)
        if self._is_closing or num_unadmitted >= 2 * self._limits.max_unauthenticated:
            return _Refused()
        core = ServerConnection(self._make_challenge(), self._limits, asyncio.get_running_loop().time())
        connection = ServedConnection(core, self._service, self._admit, self._connections.discard)
        self._connections.add(connection)
        if num_unadmitted >= self._limits.max_unauthenticated:
            core.close(Overloaded("too many connections are in their handshake", retry_after_s=1.0))
        if self._tls is None:
            return connection.link
        return TlsProtocol(connection.link, self._tls.session(Side.SERVER), self._limits.linger_s)

    def _admit(self, peer: PeerIdentity) -> None:
        if self.num_connections >= self._limits.max_connections:
            raise Overloaded(f"{self._limits.max_connections} peers are connected", retry_after_s=1.0)
        if self._check_peer is not None:
            self._check_peer(self._identity, peer)


class _Refused(asyncio.Protocol):
    """A connection for which not even a refusal can be afforded, or that was accepted just before we closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.abort()


def _check_handlers(handlers: Mapping[type[msgspec.Struct], Handler]) -> None:
    for body_type, handler in handlers.items():
        if body_type.__struct_config__.tag is None:
            raise TypeError(f"{body_type.__name__} has no tag: nothing on the wire would name the call")
        if inspect.iscoroutinefunction(handler):
            raise TypeError(f"the handler of {body_type.__name__} yields nothing: it must be an async generator")


async def _bind(host: str, port: int) -> socket.socket:
    """A bound socket on the first address that `host` stands for, so that the port means one address."""
    loop = asyncio.get_running_loop()
    found: list[Any] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
