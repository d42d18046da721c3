"""One connection of a writer over shared memory: its thread takes what the doorbells name.

handshake --> attach: map the writer's pool --> doorbell: copy, compare, report, "taken" --> doorbell ...

The thread writes into the slots of our own ticket and reads what it was shown; it leaves between two blocks when it
is cut off, or when the writer has gone away.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kv_transport.body_reader import RECEIVE_BYTES
from kv_transport.doorbell_connection import DoorbellConnection
from kv_transport.doorbell_frames import Taken, decode, encode
from kv_transport.permits import OpenFrame
from kv_transport.reception import Reception
from kv_transport.shm import PATH, ShmOptions
from kv_transport.shm_frames import (
    FROM_SENDER,
    WIRE_VERSION,
    Attach,
    Doorbell,
    check_doorbell,
)
from kv_transport.shm_pool import Block, ForeignPool, block_rows
from kv_transport.sockets import EndWatch
from pd_core.errors import ProtocolError, StaleTicket, TransferError
from pd_core.memory import BlockMemory

CopyBlock = Callable[[Block, Block], None]
"""copy(source, into)"""


class ShmConnection(DoorbellConnection):
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
        self._has_ended = EndWatch(sock).has_ended
        self._pool: ForeignPool | None = None
        self._rows: NDArray[np.uint8] | None = block_rows(memory.buffer, memory.num_blocks, memory.block_bytes)

    def _attach(self) -> None:
        # The file comes with the first byte of the first message: a second piece has none.
        data, fds, flags, _ = socket.recv_fds(self._sock, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            self._bodies.feed(data)
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
        if doorbell.number <= self._last_number:  # a copy of one whose blocks may have changed since
            raise ProtocolError(f"doorbell {doorbell.number} came after {self._last_number}")
        self._last_number = doorbell.number
        try:
            frame = self._reception.begin_frame(doorbell.ref, doorbell.indices, doorbell.digests, self)
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
        if self._pool is None or self._rows is None:
            raise ProtocolError("nothing is attached")
        if reason := self._why_to_leave():
            return reason
        pool, rows, has_digests = self._pool, self._rows, bool(frame.digests)
        blocks = zip(frame.slots, doorbell.block_ids, doorbell.indices, strict=True)
        for place, (slot, block_id, index) in enumerate(blocks):
            if slot is None:
                continue
            self._copy(pool.block(block_id), rows[slot])
            # Of the copy, and after it is whole: whatever the writer does to its block meanwhile, a digest finds it.
            # Without one, what is found is that the writer has ended the connection, which it does before.
            reason = self._why_to_leave()
            if has_digests:
                (verified if self._reception.is_right(frame, place) else corrupt).append(index)
            elif reason is None:
                verified.append(index)
            if reason is not None:
                return reason
        return None

    def _why_to_leave(self) -> str | None:
        if self._cut_reason is None and self._has_ended():
            return "the writer has gone away"
        return self._cut_reason

    def _let_go(self) -> None:
        self._pool = None
        self._rows = None
