"""The sending side of the path "tcp"."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from kv_transport.channel_sender import ChannelSender
from kv_transport.pairing import check_identity, check_peer
from kv_transport.push_job import PushJob
from kv_transport.sockets import is_quiet, left_s
from kv_transport.tcp import DATA_KIND, DEFAULT_OPTIONS, PATH, TcpOptions
from kv_transport.tcp_frames import blocks_per_frame, encode_frame_start
from kv_transport.tcp_sockets import send_all, size_buffers, tune
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.address import format_address
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.wire import PeerIdentity


class TcpBlockSender(ChannelSender):
    """BlockSender of a pool.

    identity: ours; its fingerprint is what the receiver must have too
    secret:   the cluster's
    Raises ConfigError when `identity` does not describe `memory`.
    """

    def __init__(
        self, memory: BlockMemory, identity: PeerIdentity, secret: bytes, *, options: TcpOptions = DEFAULT_OPTIONS
    ) -> None:
        check_identity(memory, identity)

        def make_wire(address: TransportAddress) -> TcpWire:
            return TcpWire(address, memory, identity, secret, options)

        super().__init__(memory, PATH, make_wire, options)


class TcpWire:
    """Wire to one host and port: the blocks themselves go through the socket."""

    def __init__(
        self, address: TransportAddress, memory: BlockMemory, identity: PeerIdentity, secret: bytes, options: TcpOptions
    ) -> None:
        self.address = format_address(address.host, address.port)
        self._host = address.host
        self._port = address.port
        self._memory = memory
        self._identity = identity
        self._secret = secret
        self._options = options
        self._frame_blocks = blocks_per_frame(memory.block_bytes, options.max_frame_bytes)

    def connect(self, adopt: Callable[[socket.socket], None]) -> None:
        """Tries what the name resolves to, in order, within one deadline. Raises KvrelayError or OSError."""
        ends_s = time.monotonic() + self._options.handshake_s
        failure: OSError = TimeoutError("no address")
        for family, kind, protocol, _, where in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            adopt(sock)
            try:
                size_buffers(sock, self._options)
                sock.settimeout(left_s(ends_s))
                sock.connect(where)
            except OSError as error:
                failure = error
                continue
            tune(sock, self._options)
            authenticate_blocking_as_client(
                sock, self._secret, self._identity, kind=DATA_KIND, deadline_s=left_s(ends_s), check_peer=check_peer
            )
            sock.settimeout(None)
            return
        raise failure

    def write(self, sock: socket.socket, job: PushJob) -> None:
        """Returns when the kernel has all bytes. Raises OSError."""
        for first in range(0, len(job.indices), self._frame_blocks):
            part = slice(first, first + self._frame_blocks)
            start = encode_frame_start(job.ref, job.indices[part], job.digests[part], self._memory.block_bytes)
            send_all(sock, [memoryview(start), *map(self._memory.block, job.block_ids[part])])
        if not is_quiet(sock):
            raise ConnectionError("closed by the receiver")
