"""Where the bytes of blocks that arrive are written to, and how they become blocks of the pool.

A pool in the memory of this host is written to directly. One on a device has only a few blocks of such memory: a frame
is given some of them when it begins, and its writer counts as being inside its blocks until the device has them.

    begin_frame -- enter --> slots of the memory: bytes, digests -- leave --> the pool's blocks --> the frame has ended
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kv_transport.permits import OpenFrame
from pd_core.memory import BlockPool


class Landing(BlockPool, Protocol):
    """Of one pool. `enter`, `leave` and `look_again` may be called from any thread."""

    @property
    def most_frame_blocks(self) -> int | None:
        """Most blocks that one frame may have; None where the pool sets no limit."""
        ...

    def enter(self, block_ids: Sequence[int | None], is_wanted: Callable[[], bool]) -> Sequence[int | None]:
        """Where in the memory each block's bytes go; None stays None. Waits for room, as long as the frame is wanted.

        At most `most_frame_blocks` at once. Raises TransferError when there was none in time, StaleTicket when the
        frame is not wanted any more: nothing was taken then.
        """
        ...

    def leave(self, frame: OpenFrame, verified: Collection[int], then: Callable[[], None]) -> None:
        """Nobody writes into the slots of the frame any more. Those of the indices in `verified` are to be the pool's.

        then: called once, by any thread, when they are and nothing reads or writes the frame's blocks; never when the
              device fails, whose blocks are in an unknown state then
        """
        ...

    def look_again(self) -> None:
        """Some frame may have become unwanted: those that wait for room ask."""
        ...


class DirectLanding:
    """The pool is the memory that the bytes are written to: there is nothing to be done."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._pool.block_bytes

    @property
    def most_frame_blocks(self) -> None:
        return None

    def enter(self, block_ids: Sequence[int | None], is_wanted: Callable[[], bool]) -> Sequence[int | None]:
        return block_ids

    def leave(self, frame: OpenFrame, verified: Collection[int], then: Callable[[], None]) -> None:
        then()

    def look_again(self) -> None:
        """Nobody ever waits."""
