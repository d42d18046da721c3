"""The sender's half of a connection over UCX: what it says on the control connection, and sends beside it."""

from __future__ import annotations

import logging
import secrets
import select
import socket
from collections.abc import Sequence

from kv_transport.answer_reader import AnswerReader
from kv_transport.doorbell_frames import Attached, Taken, encode
from kv_transport.sockets import left_s, shut_down
from kv_transport.ucx import UcxOptions
from kv_transport.ucx_frames import (
    FROM_RECEIVER,
    NONCE_BYTES,
    WIRE_VERSION,
    Answer,
    Attach,
    Doorbell,
    Ready,
    Welcome,
    check_address,
    check_ready,
)
from kv_transport.ucx_library import Request
from kv_transport.ucx_side import UcxSide, Woken, all_completed
from pd_core.errors import ProtocolError, TransferError

_log = logging.getLogger(__name__)


class SenderPair:
    """A control connection that has proved itself, and a new UCX side for it. Belongs to one thread.

    Its methods raise TransferError or OSError when it does not work, and it is over then.
    """

    def __init__(self, sock: socket.socket, side: UcxSide, options: UcxOptions) -> None:
        self.last_number = 0
        self.next_tag = 0
        self._sock = sock
        self._side = side
        self._options = options
        self._answers = AnswerReader(FROM_RECEIVER, options.unacknowledged_s)

    def greet(self, block_bytes: int, ends_s: float) -> None:
        """Has UCX carry a nonce across, before `ends_s` of time.monotonic."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._sock.settimeout(left_s(ends_s))
        self._sock.sendall(encode(Attach(WIRE_VERSION, block_bytes, self._side.address, nonce)))
        welcome = self._answers.next_answer(self._sock)
        if not isinstance(welcome, Welcome):
            raise self._unexpected(welcome, "the receiver's UCX address")
        try:
            check_address(welcome.address, self._side.address)
            self._side.connect(welcome.address, self._sock)
        except ProtocolError as error:
            raise TransferError(error.message) from error
        self.next_tag = welcome.first_tag + 1
        attached = self._send([memoryview(bytearray(nonce))], [welcome.first_tag], left_s(ends_s))
        if not isinstance(attached, Attached):
            raise self._unexpected(attached, "the word that UCX gets through")
        self._sock.settimeout(None)

    def push(self, bell: Doorbell, blocks: Sequence[memoryview]) -> None:
        """Sends what the receiver wants of the blocks; returns when it has taken them."""
        self.last_number = bell.number
        self.next_tag = bell.first_tag + len(blocks)
        self._sock.sendall(encode(bell))
        ready = self._answer(self._options.unacknowledged_s)
        if not isinstance(ready, Ready):
            raise self._unexpected(ready, "the word that receives are posted")
        try:
            check_ready(ready, bell)
        except ProtocolError as error:
            raise TransferError(error.message) from error
        if not ready.wanted:
            return
        wanted = [blocks[place] for place in ready.wanted]
        tags = [bell.first_tag + place for place in ready.wanted]
        taken = self._send(wanted, tags, self._options.unacknowledged_s)
        if taken != Taken(bell.number):
            raise self._unexpected(taken, "the word that blocks are taken")

    def end(self) -> None:
        """Ends UCX's part."""
        self._side.close()

    def _send(self, blocks: Sequence[memoryview], tags: Sequence[int], silence_s: float) -> Answer:
        """Sends them; what the receiver says to it. UCX reads none of the blocks any more then, nor after an error."""
        sends: list[Request] = []
        try:
            sends.extend(self._side.send(block, tag) for block, tag in zip(blocks, tags, strict=True))
            answer = self._answer(silence_s, sends)
            self._side.check(sends)
        except BaseException:
            self._abandon(sends)
            raise
        finally:
            sends.clear()  # they would keep UCX's worker for as long as somebody keeps the error
        return answer

    def _abandon(self, sends: Sequence[Request]) -> None:
        """Returns when UCX reads none of the blocks any more."""
        shut_down(self._sock)
        if not self._side.settle(sends):
            _log.critical("UCX does not let go of blocks that were being sent")

    def _answer(self, silence_s: float, sends: Sequence[Request] = ()) -> Answer:
        """The next message, when all of `sends` are complete too."""
        answer: Answer | None = None

        def is_done() -> bool:
            return answer is not None and all_completed(sends)

        while not is_done():
            events = select.POLLRDHUP | (select.POLLIN if answer is None else 0)
            woken = self._side.wait(is_done, events, silence_s)
            if woken is Woken.SILENCE:
                raise TransferError(f"silent for {silence_s:g} s")
            if woken is Woken.SOCKET:
                if answer is not None:
                    raise ConnectionError("closed by the receiver")
                answer = self._answers.next_answer(self._sock)
        if answer is None:
            raise TransferError("no answer")
        return answer

    def _unexpected(self, answer: Answer, wanted: str) -> TransferError:
        return TransferError(f"{answer} came, not {wanted}")
