"""What the receiving side of every path shares: permits, digests, events to the loop, counters, closing a ticket.

a path's thread or task                      event loop of the worker
begin_frame .. bytes .. end_frame   ----->   the listener of the ticket
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Sequence

from kv_transport.digest import block_digest
from kv_transport.interface import BlocksArrived, ReceiverEvent, WriterStopped
from kv_transport.landing import Landing
from kv_transport.permits import OpenFrame, PermitTable, Writer
from pd_core.errors import InvalidTransition, ProtocolError, StaleTicket, TransferError
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TicketRef

_log = logging.getLogger(__name__)

COUNTER_NAMES = (
    "kv_bytes_received",  # bytes of whole blocks that went into slots
    "kv_blocks_corrupt",  # blocks with other bytes than their digest says
    "kv_blocks_duplicate",  # blocks that were there already, or that another writer was just writing
    "kv_frames_stale",  # frames for tickets that nobody waits for
    "kv_connections_refused",  # peers that could not prove themselves, do not fit, or were too many
)


class Reception:
    """The permits of one pool and the listeners of its tickets.

    memory:  what writers write into; landing: how that becomes the pool's blocks
    grace_s: how long a writer may take to end its frame once its ticket is closed
    leave_s: how long it may take to leave once it was cut off
    `open_ticket`, `close_ticket` and `close` belong to `loop`; everything else may be called from any thread.
    """

    def __init__(
        self,
        memory: BlockMemory,
        landing: Landing,
        loop: asyncio.AbstractEventLoop,
        grace_s: float,
        leave_s: float,
    ) -> None:
        self._memory = memory
        self._landing = landing
        self._loop = loop
        self._grace_s = grace_s
        self._leave_s = leave_s
        self._listeners: dict[TicketRef, Callable[[ReceiverEvent], None]] = {}
        self._counters_lock = threading.Lock()
        self._counters = dict.fromkeys(COUNTER_NAMES, 0.0)
        self._is_closed = False
        self.permits = PermitTable(landing.num_blocks)

    def open_ticket(self, ticket: Ticket, on_event: Callable[[ReceiverEvent], None]) -> None:
        """Raises InvalidTransition when a slot may still be written under another ticket, or after `close`."""
        if self._is_closed:
            raise InvalidTransition(f"the receiver is closed: no permit for {ticket.ref}")
        self.permits.open_permit(ticket.ref, ticket.block_ids, needs_digests=ticket.with_digests)
        self._listeners[ticket.ref] = on_event

    async def close_ticket(self, ref: TicketRef) -> None:
        """See BlockReceiver. Raises TransferError when a writer that was cut off has not left within `leave_s`: its
        blocks must then stay in quarantine; calling again waits again.
        """
        self._listeners.pop(ref, None)
        left = asyncio.Event()
        if not self.permits.revoke(ref, functools.partial(self.post, left.set)):
            return
        self._landing.look_again()
        if await _happens(left, self._grace_s):
            return
        for writer in self.permits.writers_inside(ref):
            writer.cut(f"its ticket was closed and its frame did not end within {self._grace_s:g} s")
        if not await _happens(left, self._leave_s):
            raise TransferError(f"a writer that was cut off is still inside the blocks of {ref}")

    async def close(self) -> None:
        """Ends every permit without grace. Raises TransferError when a writer does not leave within `leave_s`."""
        self._is_closed = True
        self._listeners.clear()
        waits = []
        for ref in self.permits.refs():
            left = asyncio.Event()
            waits.append(left)
            for writer in self.permits.revoke(ref, functools.partial(self.post, left.set)):
                writer.cut("the receiver is being closed")
        self._landing.look_again()
        for left in waits:
            if not await _happens(left, self._leave_s):
                raise TransferError("a writer that was cut off is still inside its blocks")

    def begin_frame(self, ref: TicketRef, indices: Sequence[int], digests: Sequence[int], writer: Writer) -> OpenFrame:
        """See PermitTable.begin_frame and Landing.enter, which sets the frame's slots; a stale frame is counted.

        Raises TransferError when the memory has no room for so long that the writer has to come again.
        """
        try:
            frame = self.permits.begin_frame(ref, indices, digests, writer)
        except StaleTicket:
            self.count("kv_frames_stale", 1)
            raise
        self.count("kv_blocks_duplicate", frame.slots.count(None))
        self._let_in(frame)
        return frame

    def _let_in(self, frame: OpenFrame) -> None:
        most = self._landing.most_frame_blocks
        try:
            if most is not None and len(frame.slots) > most:
                raise ProtocolError(f"a frame of {len(frame.slots)} blocks, and the ticket allows {most}")
            frame.slots = self._landing.enter(frame.slots, functools.partial(self.permits.is_open, frame.ref))
        except BaseException as error:
            self.permits.end_frame(frame, [])
            if isinstance(error, StaleTicket):
                self.count("kv_frames_stale", 1)
            elif isinstance(error, TransferError):
                self.writer_stopped(frame.ref, error.message)
            raise

    def is_right(self, frame: OpenFrame, place: int) -> bool:
        """Whether the frame's block at `place`, which has a slot and is whole in it, is what its digest says.

        Always, in a frame without digests.
        """
        slot = frame.slots[place]
        return slot is None or not frame.digests or block_digest(self._memory.block(slot)) == frame.digests[place]

    def end_frame(self, frame: OpenFrame, num_whole: int) -> None:
        """The writer is out of the frame, whose first `num_whole` blocks have arrived whole: compares and reports.

        This or `leave_frame` must be called exactly once for every frame that has begun, however it ends.
        """
        verified: list[int] = []
        corrupt: list[int] = []
        try:
            for place in range(num_whole):
                if frame.slots[place] is not None:
                    (verified if self.is_right(frame, place) else corrupt).append(frame.indices[place])
        finally:
            self.leave_frame(frame, verified, corrupt)

    def leave_frame(self, frame: OpenFrame, verified: list[int], corrupt: list[int]) -> None:
        """The same for a path that asks `is_right` itself; blocks in neither list have not arrived whole."""
        self._landing.leave(frame, verified, functools.partial(self._landed, frame, verified, corrupt))

    def _landed(self, frame: OpenFrame, verified: list[int], corrupt: list[int]) -> None:
        """Nothing reads or writes the frame's blocks any more, and those that are verified are the pool's."""
        self.permits.end_frame(frame, verified)
        num_bytes = (len(verified) + len(corrupt)) * self._memory.block_bytes
        self.count("kv_bytes_received", num_bytes)
        self.count("kv_blocks_corrupt", len(corrupt))
        if verified or corrupt:
            self.post(self._deliver, BlocksArrived(frame.ref, verified, corrupt, num_bytes, frame.writer.path))

    def writer_stopped(self, ref: TicketRef, reason: str) -> None:
        """Tells the ticket's listener that a connection broke in the middle of a frame."""
        self.post(self._deliver, WriterStopped(ref, reason))

    def count(self, name: str, amount: int) -> None:
        with self._counters_lock:
            self._counters[name] += amount

    def counters(self) -> dict[str, float]:
        with self._counters_lock:
            return dict(self._counters)

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Has the loop call `callback` soon. A loop that has been closed under us has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            _log.warning("the event loop was closed before its block receiver")

    def _deliver(self, event: ReceiverEvent) -> None:
        listener = self._listeners.get(event.ref)
        if listener is not None:
            listener(event)


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
