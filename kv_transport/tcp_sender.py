"""The sending side of the path "tcp"."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from kv_transport.channel_sender import ChannelSender
from kv_transport.dialing import connect_to
from kv_transport.pairing import check_identity, check_peer
from kv_transport.push_job import PushJob
from kv_transport.sockets import is_quiet, left_s, shut_down
from kv_transport.stripes import FixedStripes, MeasuredStripes, StripePlan
from kv_transport.tcp import DATA_KIND, DEFAULT_OPTIONS, PATH, TcpOptions
from kv_transport.tcp_frames import blocks_per_frame, encode_frame_start
from kv_transport.tcp_sockets import size_buffers, tune
from kv_transport.tcp_stream import DataStream, make_stream
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.address import format_address
from pd_rpc.auth import Side
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.tls import Tls
from pd_rpc.wire import PeerIdentity


class TcpBlockSender(ChannelSender):
    """BlockSender of a pool.

    identity:    ours; its fingerprint is what the receiver must have too
    secret:      the cluster's
    connections: to each receiver; None is as many as measure fastest
    tls:         what both sides show each other first; without, KV can be read on the network
    Raises ConfigError when `identity` does not describe `memory`.
    """

    def __init__(
        self,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        connections: int | None = None,
        options: TcpOptions = DEFAULT_OPTIONS,
        tls: Tls | None = None,
    ) -> None:
        check_identity(memory, identity)

        def make_wire(address: TransportAddress) -> TcpWire:
            return TcpWire(address, memory, identity, secret, options, tls)

        def make_plan() -> StripePlan:
            return MeasuredStripes() if connections is None else FixedStripes(connections)

        super().__init__(memory, PATH, make_wire, options, make_plan)


class TcpWire:
    """Wire to one host and port: the blocks themselves go through the socket."""

    def __init__(
        self,
        address: TransportAddress,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        options: TcpOptions,
        tls: Tls | None,
    ) -> None:
        self.address = format_address(address.host, address.port)
        self._host = address.host
        self._port = address.port
        self._memory = memory
        self._identity = identity
        self._secret = secret
        self._options = options
        self._tls = tls
        self._stream: DataStream | None = None
        self._frame_blocks = blocks_per_frame(memory.block_bytes, options.max_frame_bytes)

    def connect(self, adopt: Callable[[socket.socket], None]) -> None:
        """Tries what the name resolves to, in order, within one deadline. Raises KvrelayError or OSError."""
        ends_s = time.monotonic() + self._options.handshake_s

        def make_socket(family: int, kind: int, protocol: int) -> socket.socket:
            sock = socket.socket(family, kind, protocol)
            adopt(sock)
            size_buffers(sock, self._options)
            return sock

        sock = connect_to(self._host, self._port, make_socket, ends_s)
        tune(sock, self._options)
        self._prove(sock, ends_s)

    def _prove(self, sock: socket.socket, ends_s: float) -> None:
        stream = make_stream(sock, self._tls, Side.CLIENT)
        stream.begin(left_s(ends_s))
        authenticate_blocking_as_client(
            stream.handshake_socket,
            self._secret,
            self._identity,
            kind=DATA_KIND,
            deadline_s=left_s(ends_s),
            limit_s=self._options.handshake_s,
            check_peer=check_peer,
        )
        sock.settimeout(None)
        self._stream = stream

    def write(self, sock: socket.socket, job: PushJob) -> None:
        """Returns when the kernel has all bytes. Raises OSError."""
        stream = self._stream
        if stream is None:
            raise ConnectionError("there is no connection")
        for first in range(0, len(job.indices), self._frame_blocks):
            part = slice(first, first + self._frame_blocks)
            start = encode_frame_start(job.ref, job.indices[part], job.digests[part], self._memory.block_bytes)
            stream.send_all([memoryview(start), *map(self._memory.block, job.block_ids[part])])
        if not is_quiet(sock):
            raise ConnectionError("closed by the receiver")
        if stream.is_worn:
            shut_down(sock)  # the next push finds it ended and makes another

    def disconnect(self) -> None:
        self._stream = None
