"""One connection of a writer over shared memory: its thread takes what the doorbells name.

handshake --> attach: map the writer's pool --> doorbell: copy, compare, report, "taken" --> doorbell ...

The thread writes into the slots of our own ticket and reads what it was shown; it leaves between two blocks when it
is cut off, or when the writer has gone away.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from kv_transport.connection import WriterConnection
from kv_transport.digest import block_digest
from kv_transport.permits import OpenFrame
from kv_transport.reception import Reception
from kv_transport.shm import PATH, ShmOptions
from kv_transport.shm_frames import (
    FROM_SENDER,
    MAX_BODY_BYTES,
    MAX_REASON_CHARS,
    WIRE_VERSION,
    Attach,
    Attached,
    Doorbell,
    Refused,
    Taken,
    check_doorbell,
    decode,
    encode,
)
from kv_transport.shm_pool import ForeignPool
from kv_transport.sockets import is_closed_by_peer, limit_send
from pd_core.errors import KvrelayError, ProtocolError, StaleTicket, TransferError
from pd_core.memory import BlockMemory
from pd_rpc.frames import FrameReader

RECEIVE_BYTES = 64 * 1024

CopyBlock = Callable[[memoryview, memoryview], None]
"""copy(source, into)"""


class ShmConnection(WriterConnection):
    """copy: copies one block without the interpreter lock"""

    path = PATH

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        memory: BlockMemory,
        reception: Reception,
        options: ShmOptions,
        authenticate: Callable[[socket.socket], object],
        copy: CopyBlock,
    ) -> None:
        super().__init__(sock, address, memory, reception, options, authenticate)
        self._copy = copy
        self._frames = FrameReader(MAX_BODY_BYTES)
        self._pool: ForeignPool | None = None
        self._is_proved = False

    def _open(self) -> None:
        self._is_proved = True
        limit_send(self._sock, self._options.frame_silence_s)
        # The file comes with the first byte of the first message: a second piece has none.
        data, fds, flags, _ = socket.recv_fds(self._sock, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            self._frames.feed(data)
            if not fds or flags & socket.MSG_CTRUNC:
                raise ProtocolError("one file has to come with the first message")
            body = self._next_body(self._options.frame_silence_s)
            message = None if body is None else decode(FROM_SENDER, body)
            if not isinstance(message, Attach):
                raise ProtocolError(f"the first message has to be an attach, not {type(message).__name__}")
            self._pool = self._map(message, fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        self._sock.sendall(encode(Attached()))

    def _map(self, attach: Attach, fd: int) -> ForeignPool:
        if attach.version != WIRE_VERSION:
            raise ProtocolError(f"wire version of shared memory: ours {WIRE_VERSION}, theirs {attach.version}")
        if attach.block_bytes != self._memory.block_bytes:
            raise ProtocolError(f"blocks of {attach.block_bytes} bytes, ours have {self._memory.block_bytes}")
        return ForeignPool(fd, attach.num_blocks, attach.block_bytes, attach.nonce)

    def _serve_frame(self) -> bool:
        body = self._next_body(self._options.receiver_idle_s)
        if body is None:
            return False
        doorbell = decode(FROM_SENDER, body)
        if not isinstance(doorbell, Doorbell):
            raise ProtocolError(f"{type(doorbell).__name__} came a second time")
        check_doorbell(doorbell)
        try:
            frame = self._reception.begin_frame(doorbell.ref, doorbell.indices, self)
        except StaleTicket:
            self._say_taken(doorbell)  # counted; nothing of it is read
        except ProtocolError as error:
            self._reception.writer_stopped(doorbell.ref, f"{self.address}: {error.message}")
            raise
        else:
            self._take(frame, doorbell)
        return True

    def _take(self, frame: OpenFrame, doorbell: Doorbell) -> None:
        """Copies block by block, each compared at once. Raises TransferError when it has to stop half-way.

        The writer hears of it before our event loop does: both go on at the same time then, and it is the writer who
        has the longer way to go.
        """
        verified: list[int] = []
        corrupt: list[int] = []
        reason: str | None = "failed"
        try:
            reason = self._take_blocks(frame, doorbell, verified, corrupt)
            if reason is None:
                self._say_taken(doorbell)
        except ProtocolError as error:
            reason = error.message
        finally:
            self._reception.leave_frame(frame, verified, corrupt)
            if reason is not None:
                reason = f"{self.address}: stopped in the middle of a frame: {reason}"
                self._reception.writer_stopped(frame.ref, reason)
        if reason is not None:
            raise TransferError(reason)

    def _say_taken(self, doorbell: Doorbell) -> None:
        self._sock.sendall(encode(Taken(doorbell.number)))

    def _take_blocks(self, frame: OpenFrame, doorbell: Doorbell, verified: list[int], corrupt: list[int]) -> str | None:
        """Why it stopped half-way, if it did. Raises ProtocolError for a block that the writer's pool does not have."""
        if self._pool is None:
            raise ProtocolError("nothing is attached")
        for place, slot in enumerate(frame.slots):
            if self._cut_reason is not None:
                return self._cut_reason
            if is_closed_by_peer(self._sock):
                return "the writer has gone away"
            if slot is None:
                continue
            into = self._memory.block(slot)
            self._copy(self._pool.block(doorbell.block_ids[place]), into)
            # Of the copy, and after it is whole: whatever the writer does to its block meanwhile, it is found.
            is_right = block_digest(into) == doorbell.digests[place]
            (verified if is_right else corrupt).append(doorbell.indices[place])
        return None

    def _next_body(self, idle_s: float) -> bytes | None:
        """The next message; None when the peer has ended the connection before its first byte, or is idle too long.

        Raises TransferError for one that is not whole within one silence limit, however slowly it drips.
        """
        silence_s = self._options.frame_silence_s
        idle_ends_s, frame_ends_s = time.monotonic() + idle_s, time.monotonic() + silence_s
        while (body := self._frames.next_body()) is None:
            is_inside = self._frames.is_inside_frame
            try:
                data = self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                data = None
            now_s = time.monotonic()
            if is_inside and (not data or now_s >= frame_ends_s):
                raise TransferError(f"the connection ended in a frame, or it was not whole within {silence_s:g} s")
            if data:
                frame_ends_s = frame_ends_s if is_inside else now_s + silence_s
                self._frames.feed(data)
            elif data is not None or self._cut_reason is not None or now_s >= idle_ends_s:
                return None
        return body

    def _give_up(self, error: KvrelayError | OSError) -> None:
        if not self._is_proved or self._cut_reason is not None:
            return
        reason = error.message if isinstance(error, KvrelayError) else str(error)
        try:
            self._sock.send(encode(Refused(reason[:MAX_REASON_CHARS])), socket.MSG_DONTWAIT)
        except OSError:
            return  # it reads nothing: it need not know

    def _let_go(self) -> None:
        self._pool = None
