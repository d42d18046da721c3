"""Who holds each block of one pool.

            try_hold                    release (last holder)
    FREE ----------------> HELD --------------------------------> FREE
      \\                    ^
       \\ try_reserve       | commit
        `--------------> RESERVED --- abort ---> QUARANTINED --- end_quarantine ---> FREE

Every block is in exactly one of these states; their sum is always the total. A reservation has an epoch, the pool's
counter, so that a writer of an earlier reservation can be told from the present one. Quarantined blocks may still be
written into and are nobody's until the transport says that no writer is left.

The ledger knows no clock and no socket. A call that makes no sense raises InvalidTransition and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from pd_core.errors import InvalidTransition, LedgerCorrupt


class BlockState(enum.Enum):
    FREE = "free"
    RESERVED = "reserved"
    HELD = "held"
    QUARANTINED = "quarantined"


class LedgerCounts(msgspec.Struct, frozen=True):
    """How many blocks are in each state."""

    total: int
    free: int
    reserved: int
    held: int
    quarantined: int

    @property
    def is_idle(self) -> bool:
        return self.free == self.total


class LedgerReport(msgspec.Struct, frozen=True):
    """The ledger for a person: counts, and who has how many blocks. Epochs are the keys of the last two."""

    incarnation: str
    counts: LedgerCounts
    holders: dict[str, int]
    reservations: dict[str, int]
    quarantined: dict[str, int]


class Reservation(msgspec.Struct, frozen=True):
    """Blocks set aside for one ticket, in the order of the ticket's range."""

    epoch: int
    block_ids: list[int]


class BlockLedger:
    """The blocks 0 .. num_blocks - 1 of the pool of one boot (`incarnation`)."""

    def __init__(self, num_blocks: int, incarnation: str) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool has at least one block, not {num_blocks}")
        self.incarnation = incarnation
        self._num_blocks = num_blocks
        self._epoch = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[str, list[int]] = {}
        self._num_holders = [0] * num_blocks
        self._reserved: dict[int, list[int]] = {}
        self._quarantined: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def epoch(self) -> int:
        """Epoch of the newest reservation; 0 before the first."""
        return self._epoch

    def try_hold(self, holder: str, num_blocks: int) -> list[int] | None:
        """Takes free blocks for `holder`, after those it already has; None when there are too few."""
        self._check_amount(num_blocks)
        if num_blocks > len(self._free):
            return None
        taken = self._take(num_blocks)
        for block_id in taken:
            self._num_holders[block_id] = 1
        self._held.setdefault(holder, []).extend(taken)
        return taken

    def share(self, holder: str, block_ids: Sequence[int]) -> None:
        """`holder` holds blocks too that somebody holds already (an outgoing transfer of a request's blocks)."""
        mine = self._held.get(holder, [])
        for block_id in block_ids:
            held = 0 <= block_id < self._num_blocks and self._num_holders[block_id] > 0
            if not held or block_id in mine:
                raise InvalidTransition(f"block {block_id} cannot be shared with {holder}: {self._where(block_id)}")
        if len(set(block_ids)) != len(block_ids):
            raise InvalidTransition(f"{holder} asks to share a block twice")
        for block_id in block_ids:
            self._num_holders[block_id] += 1
        self._held.setdefault(holder, []).extend(block_ids)

    def release(self, holder: str) -> None:
        """`holder` gives up all its blocks; those that nobody else holds are free."""
        if holder not in self._held:
            raise InvalidTransition(f"{holder} holds nothing to release")
        for block_id in self._held.pop(holder):
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                self._free.append(block_id)

    def holds(self, holder: str) -> list[int]:
        """Blocks of `holder`, in the order it got them; empty when it has none."""
        return list(self._held.get(holder, []))

    def try_reserve(self, num_blocks: int) -> Reservation | None:
        """Sets free blocks aside for a ticket under a new epoch; None (and no new epoch) when there are too few."""
        self._check_amount(num_blocks)
        if num_blocks > len(self._free):
            return None
        self._epoch += 1
        self._reserved[self._epoch] = self._take(num_blocks)
        return Reservation(self._epoch, list(self._reserved[self._epoch]))

    def commit(self, epoch: int, holder: str) -> list[int]:
        """The reservation's blocks are `holder`'s from now on, before any that it holds already."""
        if epoch not in self._reserved:
            raise InvalidTransition(f"epoch {epoch} is no open reservation: it cannot be committed")
        block_ids = self._reserved.pop(epoch)
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        self._held[holder] = block_ids + self._held.get(holder, [])
        return list(block_ids)

    def abort(self, epoch: int) -> None:
        """The reservation is given up; writers may still be inside its blocks."""
        if epoch not in self._reserved:
            raise InvalidTransition(f"epoch {epoch} is no open reservation: it cannot be aborted")
        self._quarantined[epoch] = self._reserved.pop(epoch)

    def end_quarantine(self, epoch: int) -> None:
        """Nothing can write into the aborted reservation's blocks any more: they are free."""
        if epoch not in self._quarantined:
            raise InvalidTransition(f"epoch {epoch} is not in quarantine")
        self._free.extend(self._quarantined.pop(epoch))

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            total=self._num_blocks,
            free=len(self._free),
            reserved=sum(map(len, self._reserved.values())),
            held=sum(1 for holders in self._num_holders if holders),
            quarantined=sum(map(len, self._quarantined.values())),
        )

    def report(self) -> LedgerReport:
        return LedgerReport(
            incarnation=self.incarnation,
            counts=self.counts(),
            holders={holder: len(block_ids) for holder, block_ids in self._held.items()},
            reservations={str(epoch): len(block_ids) for epoch, block_ids in self._reserved.items()},
            quarantined={str(epoch): len(block_ids) for epoch, block_ids in self._quarantined.items()},
        )

    def validate(self) -> None:
        """Raises LedgerCorrupt unless every block is in exactly one state and every holder is counted once."""
        seen: dict[int, BlockState] = {}
        num_holders = [0] * self._num_blocks
        for block_ids in self._held.values():
            for block_id in block_ids:
                num_holders[block_id] += 1
        if num_holders != self._num_holders:
            raise LedgerCorrupt("holders are miscounted")
        for state, lists in (
            (BlockState.FREE, [self._free]),
            (BlockState.RESERVED, list(self._reserved.values())),
            (BlockState.QUARANTINED, list(self._quarantined.values())),
            (BlockState.HELD, [[i for i, holders in enumerate(num_holders) if holders]]),
        ):
            for block_id in (block_id for block_ids in lists for block_id in block_ids):
                if block_id in seen:
                    raise LedgerCorrupt(f"block {block_id} is {seen[block_id].value} and {state.value}")
                seen[block_id] = state
        if len(seen) != self._num_blocks:
            raise LedgerCorrupt(f"{self._num_blocks - len(seen)} blocks are in no state")

    def _check_amount(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise InvalidTransition(f"{num_blocks} blocks cannot be taken")

    def _take(self, num_blocks: int) -> list[int]:
        return [self._free.pop() for _ in range(num_blocks)]

    def _where(self, block_id: int) -> str:
        if not 0 <= block_id < self._num_blocks:
            return f"outside the pool of {self._num_blocks}"
        if self._num_holders[block_id]:
            return "held already by the same holder"
        for state, places in (
            (BlockState.RESERVED, self._reserved),
            (BlockState.QUARANTINED, self._quarantined),
        ):
            for epoch, block_ids in places.items():
                if block_id in block_ids:
                    return f"{state.value} under epoch {epoch}"
        return BlockState.FREE.value
