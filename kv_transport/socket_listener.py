"""What the listeners of every path over sockets share: writers that prove themselves are accepted until it stops."""

from __future__ import annotations

import socket

from kv_transport.connection import WriterConnection
from kv_transport.pairing import check_identity, check_peer
from kv_transport.path_options import PathOptions
from kv_transport.reception import Reception
from kv_transport.writer_acceptor import ServeWriter, WriterAcceptor
from pd_core.errors import InvalidTransition
from pd_core.memory import BlockMemory
from pd_rpc.blocking import HandshakeSocket, authenticate_blocking_as_server
from pd_rpc.wire import PeerIdentity


class SocketListener:
    """The part of a PathListener that is the same whatever kind of socket it has.

    identity: ours; its fingerprint is what writers must have too
    secret:   the cluster's
    kind:     what its connections are for, as the handshake says it
    Raises ConfigError when `identity` does not describe `memory`.
    """

    def __init__(
        self, memory: BlockMemory, identity: PeerIdentity, secret: bytes, kind: str, options: PathOptions
    ) -> None:
        check_identity(memory, identity)
        self._identity = identity
        self._secret = secret
        self._kind = kind
        self._options = options
        self._acceptor: WriterAcceptor | None = None

    @property
    def connections(self) -> list[WriterConnection]:
        return self._acceptor.connections if self._acceptor else []

    def stop(self) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()

    async def join(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.join()

    def _accept(self, name: str, listener: socket.socket, reception: Reception, serve: ServeWriter) -> None:
        """From now on writers come in at `listener`, which is bound and does not block."""
        self._acceptor = WriterAcceptor(name, listener, reception, self._options, serve)

    def _require_started(self) -> None:
        if self._acceptor is None:
            raise InvalidTransition("the receiver has not been started")

    def _authenticate(self, sock: socket.socket) -> None:
        """Raises KvrelayError or OSError."""
        self._prove(sock, self._options.handshake_s)

    def _prove(self, sock: HandshakeSocket, deadline_s: float) -> None:
        """Raises KvrelayError or OSError."""
        authenticate_blocking_as_server(
            sock, self._secret, self._identity, kind=self._kind, deadline_s=deadline_s, check_peer=check_peer
        )
