"""A ring of host memory between a pool on a device and the transports, in both directions.

    device --copy--> slot --transport-->        outward: see ring_blocks
    device <--copy-- slot <--transport--        inward:  see ring_landing

Copy and wire overlap: while a transport has some slots, the device copies others. The pool's ledger and its tickets
know the device's blocks alone.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from pd_core.device_copies import DeviceCopies
from pd_core.errors import DeadlineExceeded, EngineError, StaleTicket, TransferError
from pd_core.memory import BlockMemory
from pd_worker.copier import Copier, CopyJob
from pd_worker.ring_slots import Loan, RingSlots

ROOM_S = 2.0
"""How long a frame that arrives may wait for slots: less than a connection that is cut may take to end."""
CLOSE_S = 5.0


class DeviceRing:
    """The slots of `memory`, for a device's pool of `num_blocks` blocks. Its methods may be called from any thread.

    When the device fails nothing can be copied any more; slots and blocks that were in a copy are never given to
    anybody again.

    room_s: how long a thread waits for slots
    """

    def __init__(
        self,
        memory: BlockMemory,
        copies: DeviceCopies,
        num_blocks: int,
        *,
        room_s: float = ROOM_S,
    ) -> None:
        self.memory = memory
        self.num_blocks = num_blocks
        self.most_at_once = max(1, memory.num_blocks // 2)  # half: one part is copied while another is on the wire
        self._copies = copies
        self._has_failed = False
        self._on_failure: Callable[[EngineError], None] | None = None
        self._room_s = room_s
        self._copier = Copier()
        self._changed = threading.Condition()
        self._slots = RingSlots(memory.num_blocks)
        self._borrowers = itertools.count(1)
        self._lenders: dict[int, Callable[[list[int]], None]] = {}

    @property
    def block_bytes(self) -> int:
        return self.memory.block_bytes

    @property
    def slots(self) -> RingSlots:
        """Who has which slot; for tests, when nothing is under way."""
        return self._slots

    def start(self, on_failure: Callable[[EngineError], None]) -> None:
        """Has blocks copied from now on. `on_failure` is called once, by any thread, when the device fails."""
        self._on_failure = on_failure
        self._copier.start()

    def borrow(self, block_ids: Sequence[int], is_wanted: Callable[[], bool]) -> list[int]:
        """A slot for each block; the calling thread waits for them.

        Raises TransferError when there were none within `room_s`, StaleTicket when they are not wanted any more.
        """
        lent: list[int] = []
        ends_s = time.monotonic() + self._room_s
        with self._changed:
            borrower = self._ask(block_ids, lent.extend)
            while not lent:
                left_s = ends_s - time.monotonic()
                if left_s > 0 and is_wanted():
                    self._changed.wait(left_s)
                    continue
                del self._lenders[borrower]
                self._lend(self._slots.withdraw(borrower))
                if left_s > 0:
                    raise StaleTicket("nobody waits for the blocks any more")
                num_slots = self._slots.num_slots
                raise TransferError(f"{len(block_ids)} of {num_slots} slots were not free within {self._room_s:g} s")
        return lent

    async def borrow_soon(self, block_ids: Sequence[int], within_s: float) -> list[int]:
        """The same for the event loop. Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        has_come = asyncio.Event()
        lent: list[int] = []

        def on_lent(slots: list[int]) -> None:
            lent.extend(slots)
            call_soon(loop, has_come.set)

        with self._changed:
            borrower = self._ask(block_ids, on_lent)
        try:
            async with asyncio.timeout(within_s):
                await has_come.wait()
        except BaseException as error:
            with self._changed:
                waits = self._lenders.pop(borrower, None) is not None
                self._lend(self._slots.withdraw(borrower) if waits else self._slots.give_back(lent))
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{len(block_ids)} slots were not free within {within_s:g} s") from error
            raise
        return lent

    def copy_in(self, slots: Sequence[int], then: Callable[[], None]) -> None:
        """Onto the device, and the slots are given back. then: called by the copier's thread when all is there, and
        never when the device fails."""
        with self._changed:
            block_ids = [self._slots.block_of(slot) for slot in slots]
            self._slots.copy_began(slots)
            self._slots.give_back(slots)
        start = partial(self._copies.start_in, list(slots), block_ids)
        self._copier.put(CopyJob(start, partial(self._copied, slots, then), self.fail))

    def copy_out(self, slots: Sequence[int], then: Callable[[EngineError | None], None]) -> None:
        """From the device. then: called by the copier's thread when the slots have the bytes, or the device failed."""

        def failed(error: EngineError) -> None:
            self.fail(error)
            then(error)

        with self._changed:
            block_ids = [self._slots.block_of(slot) for slot in slots]
            self._slots.copy_began(slots)
        start = partial(self._copies.start_out, block_ids, list(slots))
        self._copier.put(CopyJob(start, partial(self._copied, slots, partial(then, None)), failed))

    def give_back(self, slots: Sequence[int]) -> None:
        """Their borrower needs them no more; those in a copy are free when it has ended."""
        with self._changed:
            self._lend(self._slots.give_back(slots))

    def look_again(self) -> None:
        """Those who wait in `borrow` ask whether they are wanted."""
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: EngineError) -> None:
        """The device has failed: who watches is told, once."""
        with self._changed:
            is_first, self._has_failed = not self._has_failed, True
        if is_first and self._on_failure is not None:
            self._on_failure(error)

    def close(self, within_s: float = CLOSE_S) -> None:
        """Returns when no copy runs. Raises EngineError when one still does at the deadline."""
        self._copier.close(within_s)
        self._copies.close()

    def _ask(self, block_ids: Sequence[int], on_lent: Callable[[list[int]], None]) -> int:
        borrower = next(self._borrowers)
        loans = self._slots.ask(borrower, block_ids)
        self._lenders[borrower] = on_lent
        self._lend(loans)
        return borrower

    def _lend(self, loans: Sequence[Loan]) -> None:
        for loan in loans:
            self._lenders.pop(loan.borrower)(loan.slots)
        if loans:
            self._changed.notify_all()

    def _copied(self, slots: Sequence[int], then: Callable[[], None]) -> None:
        with self._changed:
            self._lend(self._slots.copy_ended(slots))
        then()


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Has the loop call it soon, from any thread. A loop that has been closed under us has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
