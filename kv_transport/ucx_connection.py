"""One connection of a writer over UCX: its thread posts receives into the slots of our own ticket, and lets UCX work.

handshake --> attach, greeting --> doorbell: post, "ready", compare each as it comes, report, "taken" --> doorbell ...

The thread leaves a frame only when UCX is done with every receive that was posted for it. Where the frame ends early,
it closes the endpoint by force, after which UCX completes them all; should one not complete all the same, the frame is
never left, and its blocks stay in quarantine for as long as this process lives.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
from collections.abc import Callable, Mapping, Sequence

from kv_transport.doorbell_connection import DoorbellConnection
from kv_transport.doorbell_frames import MAX_FRAME_BLOCKS, Taken, decode, encode
from kv_transport.permits import OpenFrame
from kv_transport.reception import Reception
from kv_transport.tcp_frames import blocks_per_frame
from kv_transport.ucx import PATH, UcxOptions
from kv_transport.ucx_frames import (
    FROM_SENDER,
    MAX_FIRST_TAG,
    NONCE_BYTES,
    Attach,
    Doorbell,
    Ready,
    Welcome,
    check_attach,
    check_doorbell,
)
from kv_transport.ucx_library import Request, UcxLibrary
from kv_transport.ucx_side import UcxSide, Woken, all_completed
from pd_core.errors import ProtocolError, StaleTicket, TransferError
from pd_core.memory import BlockMemory

_log = logging.getLogger(__name__)

MARK_BYTES = 16
"""Written to the end of a slot whose block comes without a digest: still there, the block has not come whole."""


class UcxConnection(DoorbellConnection):
    """library, settings: of the UCX side that every connection has for itself"""

    path = PATH

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        memory: BlockMemory,
        reception: Reception,
        options: UcxOptions,
        authenticate: Callable[[socket.socket], object],
        library: UcxLibrary,
        settings: Mapping[str, str],
    ) -> None:
        super().__init__(sock, address, memory, reception, options, authenticate)
        self._ucx_options = options
        self._library = library
        self._settings = settings
        self._most_blocks = min(blocks_per_frame(memory.block_bytes, options.max_frame_bytes), MAX_FRAME_BLOCKS)
        self._side: UcxSide | None = None
        self._next_tag = 0
        self._stuck: Sequence[Request] = ()

    def _attach(self) -> None:
        body = self._next_body(self._options.frame_silence_s)
        attach = None if body is None else decode(FROM_SENDER, body)
        if not isinstance(attach, Attach):
            raise ProtocolError(f"the first message has to be an attach, not {type(attach).__name__}")
        side = UcxSide(self._library, self._settings)
        self._side = side
        check_attach(attach, self._memory.block_bytes, side.address)
        side.connect(attach.address, self._sock)
        # Drawn by lot: who does not know it, and UCX asks nobody for proof, cannot send anything that is received.
        self._next_tag = secrets.randbelow(MAX_FIRST_TAG)
        self._await_greeting(side, attach.nonce)

    def _await_greeting(self, side: UcxSide, nonce: bytes) -> None:
        """Raises TransferError unless the nonce comes over UCX: its port may be closed where ours is open."""
        greeting = bytearray(NONCE_BYTES)
        requests = [side.receive(memoryview(greeting), self._take_tags(1))]
        try:
            self._sock.sendall(encode(Welcome(side.address, self._next_tag - 1)))
            self._await(side, requests, self._options.handshake_s)
        finally:
            if not side.settle(requests):
                self._stuck = list(requests)
            requests.clear()  # they would keep UCX's worker for as long as somebody keeps an error
        if greeting != nonce:
            raise ProtocolError("the greeting over UCX is not the nonce of the attach")

    def _serve_frame(self) -> bool:
        body = self._next_body(self._options.receiver_idle_s)
        if body is None:
            return False
        doorbell = decode(FROM_SENDER, body)
        if not isinstance(doorbell, Doorbell):
            raise ProtocolError(f"{type(doorbell).__name__} came a second time")
        self._last_number += 1
        check_doorbell(doorbell, self._last_number, self._take_tags(len(doorbell.indices)), self._most_blocks)
        try:
            frame = self._reception.begin_frame(doorbell.ref, doorbell.indices, doorbell.digests, self)
        except StaleTicket:
            self._sock.sendall(encode(Ready(doorbell.number, [])))  # counted; nothing of it is sent
        except ProtocolError as error:
            self._reception.writer_stopped(doorbell.ref, f"{self.address}: {error.message}")
            raise
        else:
            self._take(frame, doorbell)
        return True

    def _take(self, frame: OpenFrame, doorbell: Doorbell) -> None:
        """Receives every wanted block and compares it. Raises TransferError or OSError when that stops half-way."""
        verified: list[int] = []
        corrupt: list[int] = []
        requests: dict[int, Request] = {}
        reason: str | None = "failed"
        try:
            self._receive(frame, doorbell, requests, verified, corrupt)
            reason = None
        except (TransferError, ProtocolError) as error:
            reason = error.message
        except OSError as error:
            reason = str(error)
        finally:
            self._leave(frame, list(requests.values()), verified, corrupt, reason)
            requests.clear()  # they would keep UCX's worker for as long as somebody keeps the error below
        if reason is not None:
            raise TransferError(f"stopped in the middle of a frame: {reason}")

    def _receive(
        self,
        frame: OpenFrame,
        doorbell: Doorbell,
        requests: dict[int, Request],
        verified: list[int],
        corrupt: list[int],
    ) -> None:
        """Fills in what it has posted, by the block's place, and what has come of it."""
        side = self._require_side()
        mark = secrets.token_bytes(MARK_BYTES)
        wanted = {place: self._memory.block(slot) for place, slot in enumerate(frame.slots) if slot is not None}
        for place, into in wanted.items():
            if not frame.digests:
                into[-MARK_BYTES:] = mark
            requests[place] = side.receive(into, doorbell.first_tag + place)
        self._sock.sendall(encode(Ready(doorbell.number, list(requests))))
        for place, request in requests.items():
            self._await(side, [request], self._options.frame_silence_s)
            # ucxx does not tell how much has come. A digest would.
            if not frame.digests and wanted[place][-MARK_BYTES:] == mark:
                raise ProtocolError(f"block {frame.indices[place]} came short")
            # While we compare, the kernel goes on taking the next block.
            is_right = self._reception.is_right(frame, place)
            (verified if is_right else corrupt).append(frame.indices[place])
        if requests:
            self._sock.sendall(encode(Taken(doorbell.number)))

    def _await(self, side: UcxSide, requests: Sequence[Request], silence_s: float) -> None:
        """Returns when their memory has what was sent. Raises TransferError when that will not be."""
        woken = side.wait(lambda: all_completed(requests), select.POLLRDHUP, silence_s)
        if woken is Woken.DONE:
            side.check(requests)
            return
        gone = "the writer has gone away" if woken is Woken.SOCKET else f"silent for {silence_s:g} s"
        raise TransferError(self._cut_reason or gone)

    def _leave(
        self,
        frame: OpenFrame,
        requests: Sequence[Request],
        verified: list[int],
        corrupt: list[int],
        reason: str | None,
    ) -> None:
        if not self._require_side().settle(requests):
            self._stuck = requests
            _log.critical("%s: UCX does not let go of blocks of %s: they stay in quarantine", self.address, frame.ref)
            return
        self._reception.leave_frame(frame, verified, corrupt)
        if reason is not None:
            reason = f"{self.address}: stopped in the middle of a frame: {reason}"
            self._reception.writer_stopped(frame.ref, reason)

    def _take_tags(self, count: int) -> int:
        """The first of as many tags that nothing else has or will have."""
        first_tag = self._next_tag
        self._next_tag += count
        return first_tag

    def _require_side(self) -> UcxSide:
        if self._side is None:
            raise TransferError("nothing is attached")
        return self._side

    def _let_go(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None
