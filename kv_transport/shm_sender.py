"""The sending side of the path "shm": it shows its pool and rings; the receiver takes the blocks."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

from kv_transport.answer_reader import AnswerReader
from kv_transport.channel_sender import ChannelSender
from kv_transport.doorbell_frames import Attached, Refused, Taken, encode
from kv_transport.pairing import check_identity, check_peer
from kv_transport.push_job import PushJob
from kv_transport.shm import DATA_KIND, DEFAULT_OPTIONS, PATH, ShmOptions, socket_name
from kv_transport.shm_frames import FROM_RECEIVER, WIRE_VERSION, Attach, doorbells
from kv_transport.shm_pool import SharedBlockMemory
from kv_transport.sockets import left_s, limit_send, limit_silence
from pd_core.errors import ProtocolError, TransferError
from pd_core.ticket import TransportAddress
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.wire import PeerIdentity

MAX_WAITING_BELLS = 1
"""Doorbells that wait at the receiver while it is at another: it goes on without a word from us in between."""


class ShmBlockSender(ChannelSender):
    """BlockSender of a pool to receivers of the same host.

    A push returns when the receiver has taken the blocks. One that is cancelled or past its deadline waits for that
    a moment longer (`withdraw_s`), and then returns although a receiver that was stopped, or is just slow, may read
    the blocks later on. That is right: the receiver compares its finished copy with the digest that was made when the
    blocks were as they should be, so a copy of anything else counts as missing; without digests it counts only a copy
    after which it finds the connection open, which has been shut down before the push returns. And it writes into its
    own slots, under its own permit, so it can do no harm there.

    identity: ours; its fingerprint is what the receiver must have too
    secret:   the cluster's
    Raises ConfigError when `identity` does not describe `memory`.
    """

    def __init__(
        self,
        memory: SharedBlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        options: ShmOptions = DEFAULT_OPTIONS,
    ) -> None:
        check_identity(memory, identity)

        def make_wire(address: TransportAddress) -> ShmWire:
            return ShmWire(address, memory, identity, secret, options)

        super().__init__(memory, PATH, make_wire, options)


class ShmWire:
    """Wire to one receiver's socket: the blocks stay where they are."""

    def __init__(
        self,
        address: TransportAddress,
        memory: SharedBlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        options: ShmOptions,
    ) -> None:
        self.address = address.host
        self._memory = memory
        self._identity = identity
        self._secret = secret
        self._options = options
        self._answers = AnswerReader(FROM_RECEIVER, options.unacknowledged_s)
        self._last_number = 0

    def connect(self, adopt: Callable[[socket.socket], None]) -> None:
        """Raises KvrelayError or OSError."""
        ends_s = time.monotonic() + self._options.handshake_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        adopt(sock)
        sock.settimeout(left_s(ends_s))
        try:
            sock.connect(socket_name(self.address))
        except ConnectionRefusedError as error:
            raise TransferError(f"{self.address}: nobody listens: on another host, or gone") from error
        authenticate_blocking_as_client(
            sock,
            self._secret,
            self._identity,
            kind=DATA_KIND,
            deadline_s=left_s(ends_s),
            limit_s=self._options.handshake_s,
            check_peer=check_peer,
        )
        memory = self._memory
        attach = Attach(WIRE_VERSION, memory.num_blocks, memory.block_bytes, memory.nonce)
        sock.settimeout(left_s(ends_s))
        socket.send_fds(sock, [encode(attach)], [memory.fd])
        self._answers = AnswerReader(FROM_RECEIVER, self._options.unacknowledged_s)
        answer = self._answer(sock)
        if not isinstance(answer, Attached):
            raise ProtocolError(f"{self.address}: {type(answer).__name__} came, not the word that the pool is mapped")
        sock.settimeout(None)
        limit_silence(sock, self._options.unacknowledged_s)
        limit_send(sock, self._options.unacknowledged_s)

    def write(self, sock: socket.socket, job: PushJob) -> None:
        """Returns when the receiver has taken the blocks. Raises TransferError or OSError."""
        bells = doorbells(
            job.ref, job.indices, job.block_ids, job.digests, self._options.max_frame_blocks, self._last_number + 1
        )
        unanswered: deque[int] = deque()
        for bell in bells:
            self._last_number = bell.number
            unanswered.append(bell.number)
            sock.sendall(encode(bell))
            if len(unanswered) > MAX_WAITING_BELLS:
                self._hear_taken(sock, unanswered.popleft())
        for number in unanswered:
            self._hear_taken(sock, number)

    def disconnect(self) -> None:
        """The socket was all."""

    def _hear_taken(self, sock: socket.socket, number: int) -> None:
        answer = self._answer(sock)
        if answer != Taken(number):
            raise TransferError(f"{self.address}: {answer} came, not the word that blocks are taken")

    def _answer(self, sock: socket.socket) -> Attached | Taken | Refused:
        """See AnswerReader.next_answer; the error names the address."""
        try:
            return self._answers.next_answer(sock)
        except TransferError as error:
            raise TransferError(f"{self.address}: {error.message}") from error
