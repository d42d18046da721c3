"""Blocks that arrive for a pool on a device: written into slots of its ring, then copied onto it.

A writer is inside its frame's blocks until they have been copied, or dropped. So what the permits promise holds for the
device too: when the last writer has left an aborted ticket, no copy into its blocks is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kv_transport.permits import OpenFrame
from pd_worker.device_ring import DeviceRing


class RingLanding:
    """See kv_transport.landing.Landing."""

    def __init__(self, ring: DeviceRing) -> None:
        self._ring = ring

    @property
    def num_blocks(self) -> int:
        return self._ring.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._ring.block_bytes

    @property
    def most_frame_blocks(self) -> int:
        return self._ring.most_at_once

    def enter(self, block_ids: Sequence[int | None], is_wanted: Callable[[], bool]) -> Sequence[int | None]:
        wanted = [block_id for block_id in block_ids if block_id is not None]
        if not wanted:
            return block_ids
        slots = iter(self._ring.borrow(wanted, is_wanted))
        return [None if block_id is None else next(slots) for block_id in block_ids]

    def leave(self, frame: OpenFrame, verified: Collection[int], then: Callable[[], None]) -> None:
        right = set(verified)
        kept: list[int] = []
        dropped: list[int] = []
        for index, slot in zip(frame.indices, frame.slots, strict=True):
            if slot is not None:
                (kept if index in right else dropped).append(slot)
        if dropped:
            self._ring.give_back(dropped)
        if kept:
            self._ring.copy_in(kept, then)
        else:
            then()

    def look_again(self) -> None:
        self._ring.look_again()
