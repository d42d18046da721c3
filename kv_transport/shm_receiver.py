"""The receiving side of the path "shm"."""

from __future__ import annotations

import secrets
import socket
import struct

from kv_transport.receiver import PoolReceiver
from kv_transport.reception import Reception
from kv_transport.shm import DATA_KIND, DEFAULT_OPTIONS, PATH, ShmOptions, socket_name
from kv_transport.shm_connection import CopyBlock, ShmConnection
from kv_transport.shm_pool import copy_block
from kv_transport.socket_listener import SocketListener
from kv_transport.writer_acceptor import BACKLOG
from pd_core.errors import ConfigError
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.wire import PeerIdentity

_UCRED = struct.Struct("iII")


class ShmListener(SocketListener):
    """PathListener of a pool on an abstract Unix socket with a random name.

    The name is no file, ends with the process, and does not reach beyond the network namespace: who can connect to
    it and prove itself is on this host.

    identity, secret: see SocketListener
    copy:             see ShmConnection
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
        super().__init__(memory, identity, secret, DATA_KIND, options)
        self._memory = memory
        self._shm_options = options
        self._copy = copy
        self._host = f"@kvrelay-{secrets.token_hex(16)}"

    @property
    def address(self) -> TransportAddress:
        """Known after `start`."""
        self._require_started()
        return TransportAddress(PATH, self._host, 0)

    async def start(self, reception: Reception) -> None:
        """Binds and listens. Raises ConfigError naming the socket when that cannot be."""

        def serve(sock: socket.socket, _: object) -> ShmConnection:
            address = f"process {_peer_pid(sock)}"
            options, authenticate = self._shm_options, self._authenticate
            return ShmConnection(sock, address, self._memory, reception, options, authenticate, self._copy)

        self._accept(self._host, self._listen(), reception, serve)

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
