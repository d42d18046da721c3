"""The sending side of the path "ucx"."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from collections.abc import Callable, Iterator

from kv_transport.channel_sender import ChannelSender
from kv_transport.dialing import connect_to
from kv_transport.doorbell_frames import MAX_FRAME_BLOCKS
from kv_transport.pairing import check_identity, check_peer
from kv_transport.push_job import PushJob
from kv_transport.sockets import left_s, limit_send, limit_silence
from kv_transport.tcp_frames import blocks_per_frame
from kv_transport.tcp_sockets import tune
from kv_transport.ucx import CONTROL_KIND, DEFAULT_OPTIONS, PATH, UcxOptions
from kv_transport.ucx_frames import doorbells
from kv_transport.ucx_library import load_ucx
from kv_transport.ucx_pair import SenderPair
from kv_transport.ucx_settings import ucx_settings
from kv_transport.ucx_side import UcxSide
from pd_core.errors import TransferError
from pd_core.memory import BlockMemory
from pd_core.ticket import TransportAddress
from pd_rpc.address import format_address
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.wire import PeerIdentity


class UcxBlockSender(ChannelSender):
    """BlockSender of a pool. A push returns when the receiver has taken the blocks.

    identity: ours; its fingerprint is what the receiver must have too
    secret:   the cluster's
    host:     ours, whose interface UCX sends from
    Raises ConfigError when `identity` does not describe `memory`, ucxx is not there, or no interface has the address.
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
        check_identity(memory, identity)
        library, settings = load_ucx(), ucx_settings(host)

        def make_wire(address: TransportAddress) -> UcxWire:
            return UcxWire(address, memory, identity, secret, options, lambda: UcxSide(library, settings))

        super().__init__(memory, PATH, make_wire, options)


class UcxWire:
    """Wire to one receiver: what is said goes over the control connection, the blocks go over UCX."""

    def __init__(
        self,
        address: TransportAddress,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        options: UcxOptions,
        make_side: Callable[[], UcxSide],
    ) -> None:
        self.address = format_address(address.host, address.port)
        self._host = address.host
        self._port = address.port
        self._memory = memory
        self._identity = identity
        self._secret = secret
        self._options = options
        self._make_side = make_side
        self._most_blocks = min(blocks_per_frame(memory.block_bytes, options.max_frame_bytes), MAX_FRAME_BLOCKS)
        self._pair: SenderPair | None = None

    def connect(self, adopt: Callable[[socket.socket], None]) -> None:
        """Connects and greets, all within one deadline. Raises KvrelayError or OSError."""
        ends_s = time.monotonic() + self._options.handshake_s

        def make_socket(family: int, kind: int, protocol: int) -> socket.socket:
            sock = socket.socket(family, kind, protocol)
            adopt(sock)
            return sock

        sock = connect_to(self._host, self._port, make_socket, ends_s)
        tune(sock, self._options)
        authenticate_blocking_as_client(
            sock,
            self._secret,
            self._identity,
            kind=CONTROL_KIND,
            deadline_s=left_s(ends_s),
            limit_s=self._options.handshake_s,
            check_peer=check_peer,
        )
        sock.settimeout(None)
        limit_send(sock, self._options.unacknowledged_s)
        limit_silence(sock, self._options.unacknowledged_s)
        with self._named():
            self._pair = SenderPair(sock, self._make_side(), self._options)
            self._pair.greet(self._memory.block_bytes, ends_s)

    def write(self, sock: socket.socket, job: PushJob) -> None:
        """Returns when the receiver has taken the blocks, or does not want them. Raises TransferError or OSError."""
        pair = self._pair
        if pair is None:
            raise ConnectionError("there is no connection")
        bells = doorbells(job.ref, job.indices, job.digests, self._most_blocks, pair.last_number + 1, pair.next_tag)
        blocks = iter(job.block_ids)
        with self._named():
            for bell in bells:
                pair.push(bell, [self._memory.block(next(blocks)) for _ in bell.indices])

    def disconnect(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.end()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of a pair name the address, and keep nothing: whoever kept one would keep blocks and UCX with it."""
        try:
            yield
        except (TransferError, OSError) as error:
            traceback.clear_frames(error.__traceback__)
            raise TransferError(f"{self.address}: {error}") from error
