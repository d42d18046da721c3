"""One connection of a writer over tcp.

Blocks go from the socket straight into the slots of the receiver's own ticket; what has no slot, and a stale frame,
is drained into a scratch buffer of fixed size.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from kv_transport.connection import WriterConnection
from kv_transport.permits import OpenFrame
from kv_transport.reception import Reception
from kv_transport.tcp import PATH, TcpOptions
from kv_transport.tcp_frames import (
    MAX_FRAME_BLOCKS,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    blocks_per_frame,
    parse_header,
    parse_prefix,
)
from kv_transport.tcp_stream import DataStream
from pd_core.errors import KvrelayError, ProtocolError, StaleTicket, TransferError
from pd_core.memory import BlockMemory

SCRATCH_BYTES = 256 * 1024


class TcpConnection(WriterConnection):
    """The bytes of the blocks come over the socket itself. stream: what is read from it"""

    path = PATH

    def __init__(
        self,
        sock: socket.socket,
        stream: DataStream,
        address: str,
        memory: BlockMemory,
        reception: Reception,
        options: TcpOptions,
        authenticate: Callable[[socket.socket], object],
    ) -> None:
        super().__init__(sock, address, memory, reception, options, authenticate)
        self._stream = stream
        self._head = memoryview(bytearray(PREFIX_BYTES + MAX_HEADER_BYTES))
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._max_payload_bytes = memory.block_bytes * min(
            blocks_per_frame(memory.block_bytes, options.max_frame_bytes), MAX_FRAME_BLOCKS
        )

    def _open(self) -> None:
        """Frames follow the handshake at once."""

    def _give_up(self, error: KvrelayError | OSError) -> None:
        """The server never says anything on these connections."""

    def _let_go(self) -> None:
        """The socket was all."""

    def _serve_frame(self) -> bool:
        """Takes one frame; False at the end of the connection."""
        if not self._wait_for_frame():
            return False
        prefix = parse_prefix(self._head[:PREFIX_BYTES], self._max_payload_bytes)
        data = self._head[PREFIX_BYTES : PREFIX_BYTES + prefix.num_header_bytes]
        self._receive_start(data)
        header = parse_header(data, prefix, self._memory.block_bytes)
        try:
            frame = self._reception.begin_frame(header.ref, header.indices, header.digests, self)
        except StaleTicket:
            self._drain(prefix.num_payload_bytes)
        except ProtocolError as error:
            self._reception.writer_stopped(header.ref, f"{self.address}: {error.message}")
            raise
        else:
            self._receive_blocks(frame)
        return True

    def _receive_blocks(self, frame: OpenFrame) -> None:
        """Each block is compared as soon as it is whole: it is still in the core's cache, and the next ones wait in the
        socket meanwhile."""
        verified: list[int] = []
        corrupt: list[int] = []
        failure: str | None = "failed"
        try:
            failure = self._receive_each(frame, verified, corrupt)
        finally:
            self._reception.leave_frame(frame, verified, corrupt)
            if failure is not None:
                failure = f"{self.address}: stopped in the middle of a frame: {self._cut_reason or failure}"
                self._reception.writer_stopped(frame.ref, failure)
        if failure is not None:
            raise TransferError(failure)

    def _receive_each(self, frame: OpenFrame, verified: list[int], corrupt: list[int]) -> str | None:
        """Why it stopped half-way, if it did."""
        for place, slot in enumerate(frame.slots):
            try:
                num_bytes = sum(self._stream.receive_all(self._places(slot)))
            except BlockingIOError:
                return f"silent for {self._options.frame_silence_s:g} s"
            except OSError as error:
                return str(error)
            if num_bytes < self._memory.block_bytes:
                return "the connection ended"
            if slot is not None:
                (verified if self._reception.is_right(frame, place) else corrupt).append(frame.indices[place])
        return None

    def _wait_for_frame(self) -> bool:
        """Receives a prefix; False when the peer ended the connection before its first byte, or is idle too long."""
        ends_s = time.monotonic() + self._options.receiver_idle_s
        while True:
            try:
                num_bytes = self._stream.receive_some(self._head[:PREFIX_BYTES])
            except BlockingIOError:
                if self._cut_reason is not None or time.monotonic() >= ends_s:
                    return False
                continue
            if num_bytes == 0:
                return False
            self._receive_start(self._head[num_bytes:PREFIX_BYTES])
            return True

    def _receive_start(self, view: memoryview) -> None:
        """Fills a small piece within one silence limit, however slowly it drips. Raises TransferError."""
        if self._stream.fill(view, self._options.frame_silence_s) < len(view):
            raise TransferError(f"the start of a frame was not there within {self._options.frame_silence_s:g} s")

    def _drain(self, num_bytes: int) -> None:
        """Takes bytes that nobody wants. Raises TransferError when they end early."""
        try:
            num_bytes -= sum(self._stream.receive_all(self._scratch_for(num_bytes)))
        except BlockingIOError as error:
            raise TransferError(f"silent for {self._options.frame_silence_s:g} s in a stale frame") from error
        if num_bytes:
            raise TransferError("the connection ended in the middle of a stale frame")

    def _places(self, slot: int | None) -> list[memoryview]:
        return self._scratch_for(self._memory.block_bytes) if slot is None else [self._memory.block(slot)]

    def _scratch_for(self, num_bytes: int) -> list[memoryview]:
        """Pieces of the one scratch buffer, again and again, for bytes that nobody wants."""
        whole, rest = divmod(num_bytes, SCRATCH_BYTES)
        return [self._scratch] * whole + [self._scratch[:rest]]
