"""The receiving side of the path "shm"."""

from __future__ import annotations

import secrets
import socket
import struct

from kv_transport.connection import WriterConnection
from kv_transport.pairing import check_identity, check_peer
from kv_transport.receiver import PoolReceiver
from kv_transport.reception import Reception
from kv_transport.shm import DATA_KIND, DEFAULT_OPTIONS, PATH, ShmOptions, socket_name
from kv_transport.shm_connection import CopyBlock, ShmConnection
from kv_transport.shm_pool import copy_block
from kv_transport.writer_acceptor import BACKLOG, WriterAcceptor
from pd_core.errors import ConfigError, InvalidTransition
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.blocking import authenticate_blocking_as_server
from pd_rpc.wire import PeerIdentity

_UCRED = struct.Struct("iII")


class ShmListener:
    """PathListener of a pool on an abstract Unix socket with a random name.

    The name is no file, ends with the process, and does not reach beyond the network namespace: who can connect to
    it and prove itself is on this host.

    identity: ours; its fingerprint is what writers must have too
    secret:   the cluster's
    copy:     see ShmConnection
    Raises ConfigError when `identity` does not describe `memory`.
    """

    def __init__(
        self,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        options: ShmOptions = DEFAULT_OPTIONS,
        copy: CopyBlock = copy_block,
    ) -> None:
        check_identity(memory, identity)
        self._memory = memory
        self._identity = identity
        self._secret = secret
        self._options = options
        self._copy = copy
        self._host = f"@kvrelay-{secrets.token_hex(16)}"
        self._acceptor: WriterAcceptor | None = None

    @property
    def address(self) -> TransportAddress:
        """Known after `start`."""
        if self._acceptor is None:
            raise InvalidTransition("the receiver has not been started")
        return TransportAddress(PATH, self._host, 0)

    @property
    def connections(self) -> list[WriterConnection]:
        return self._acceptor.connections if self._acceptor else []

    async def start(self, reception: Reception) -> None:
        """Binds and listens. Raises ConfigError naming the socket when that cannot be."""

        def serve(sock: socket.socket, _: object) -> ShmConnection:
            address = f"process {_peer_pid(sock)}"
            return ShmConnection(sock, address, self._memory, reception, self._options, self._authenticate, self._copy)

        self._acceptor = WriterAcceptor(self._host, self._listen(), reception, self._options, serve)

    def stop(self) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()

    async def join(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.join()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(socket_name(self._host))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ConfigError(f"KV receiver cannot listen on {self._host}: {error}") from error
        return listener

    def _authenticate(self, sock: socket.socket) -> None:
        authenticate_blocking_as_server(
            sock,
            self._secret,
            self._identity,
            kind=DATA_KIND,
            deadline_s=self._options.handshake_s,
            check_peer=check_peer,
        )


class ShmBlockReceiver(PoolReceiver):
    """BlockReceiver over shared memory alone. See ShmListener."""

    def __init__(
        self,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        options: ShmOptions = DEFAULT_OPTIONS,
        copy: CopyBlock = copy_block,
    ) -> None:
        listener = ShmListener(memory, identity, secret, options=options, copy=copy)
        super().__init__(memory, [listener], grace_s=options.grace_s, leave_s=options.leave_s)


def _peer_pid(sock: socket.socket) -> int:
    """0 for a process of another pid namespace."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)
