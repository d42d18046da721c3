"""One push on its way through a sender: what both sides of it, coroutine and thread, know."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Sequence

import msgspec

from pd_core.errors import TransferError
from pd_core.memory import BlockMemory
from pd_core.ticket import TicketRef

_log = logging.getLogger(__name__)


class PushState(enum.Enum):
    QUEUED = "queued"  # nobody reads our blocks
    WRITING = "writing"  # a thread reads them
    OVER = "over"  # nobody will read them again


class PushOutcome(msgspec.Struct, frozen=True):
    """seconds: on the path; error: why it failed, None when all bytes have left; was_reached: a connection was there"""

    seconds: float = 0.0
    error: TransferError | None = None
    was_reached: bool = True


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
        self.digests = list(digests)
        self.state = PushState.QUEUED
        self.outcome: asyncio.Future[PushOutcome] = loop.create_future()
        self._loop = loop

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
    memory: BlockMemory, num_blocks: int, indices: Sequence[int], block_ids: Sequence[int], digests: Sequence[int]
) -> None:
    """Raises ValueError for a push that no receiver would take; a fault of the caller."""
    if not len(indices) == len(block_ids) == len(digests):
        raise ValueError(f"{len(indices)} indices, {len(block_ids)} blocks, {len(digests)} digests")
    if len(set(indices)) != len(indices) or any(not 0 <= index < num_blocks for index in indices):
        raise ValueError(f"indices {list(indices)} are not distinct places in a range of {num_blocks}")
    if any(not 0 <= block_id < memory.num_blocks for block_id in block_ids):
        raise ValueError(f"blocks {list(block_ids)} are not all in our pool of {memory.num_blocks}")
