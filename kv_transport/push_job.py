"""One push on its way through a sender: what both sides of it, coroutine and thread, know."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Sequence

import msgspec

from pd_core.errors import TransferError
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TicketRef

_log = logging.getLogger(__name__)


class PushState(enum.Enum):
    QUEUED = "queued"  # nobody reads our blocks
    WRITING = "writing"  # a thread reads them
    OVER = "over"  # nobody will read them again


class PushOutcome(msgspec.Struct, frozen=True):
    """seconds: on the path; error: why it failed, None when all bytes have left; was_reached: a connection was there

    began_s:     when its turn came, in time.monotonic
    num_waiting: bytes by which it made longer what the kernel has and the other side has not acknowledged
    """

    seconds: float = 0.0
    error: TransferError | None = None
    was_reached: bool = True
    began_s: float = 0.0
    num_waiting: int = 0


class PushJob:
    """`outcome` is done when no thread reads the blocks any more. `state` is guarded by the channel's lock."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ref: TicketRef,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
    ) -> None:
        self.ref = ref
        self.indices = list(indices)
        self.block_ids = list(block_ids)
        self.digests = digests[:]  # not a list of them: they may be made as late as they are sent
        self.state = PushState.QUEUED
        self.outcome: asyncio.Future[PushOutcome] = loop.create_future()
        self._loop = loop

    def part(self, where: slice) -> PushJob:
        """A job of its own for some of the blocks."""
        return PushJob(self._loop, self.ref, self.indices[where], self.block_ids[where], self.digests[where])

    def finish(self, outcome: PushOutcome) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._set_outcome, outcome)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            _log.warning("the event loop was closed before a push of %s ended", self.ref)

    def _set_outcome(self, outcome: PushOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def check_push(
    memory: BlockMemory, ticket: Ticket, indices: Sequence[int], block_ids: Sequence[int], digests: Sequence[int]
) -> None:
    """Raises ValueError for a push that no receiver would take; a fault of the caller."""
    num_digests = len(indices) if ticket.with_digests else 0
    if (len(block_ids), len(digests)) != (len(indices), num_digests):
        raise ValueError(
            f"{len(indices)} indices, {len(block_ids)} blocks, {len(digests)} digests: {num_digests} are wanted"
        )
    if not indices:
        return
    if len(set(indices)) != len(indices) or min(indices) < 0 or max(indices) >= ticket.num_blocks:
        raise ValueError(f"indices {list(indices)} are not distinct places in a range of {ticket.num_blocks}")
    if min(block_ids) < 0 or max(block_ids) >= memory.num_blocks:
        raise ValueError(f"blocks {list(block_ids)} are not all in our pool of {memory.num_blocks}")
