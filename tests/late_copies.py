"""Devices that copy blocks as a test wants it: on the spot, late, only when told to, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pd_core.device_copies import DeviceCopies, RunningCopy
from pd_core.memory import BlockMemory

HANG_S = 10.0


class _Late:
    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy()


class MemoryCopies:
    """DeviceCopies where the device is a memory too. A copy has ended when it is started.

    num_out, num_in: blocks copied so far
    """

    def __init__(self, device: BlockMemory, slots: BlockMemory) -> None:
        self.device = device
        self.slots = slots
        self.num_out = 0
        self.num_in = 0
        self.is_closed = False

    def start_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> RunningCopy:
        for block_id, slot in zip(block_ids, slots, strict=True):
            self.slots.block(slot)[:] = self.device.block(block_id)
        self.num_out += len(slots)
        return _Late(lambda: None)

    def start_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> RunningCopy:
        for slot, block_id in zip(slots, block_ids, strict=True):
            self.device.block(block_id)[:] = self.slots.block(slot)
        self.num_in += len(slots)
        return _Late(lambda: None)

    def close(self) -> None:
        self.is_closed = True


class LateCopies:
    """The copies of another device, whose bytes move only when the copy is waited for, and `late_s` after that.

    Whoever uses a slot or a block before its copy has ended sees, or loses, other bytes.
    """

    def __init__(self, copies: DeviceCopies, late_s: float = 0.0) -> None:
        self._copies = copies
        self._late_s = late_s

    def start_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> RunningCopy:
        return _Late(lambda: self._move(lambda: self._copies.start_out(block_ids, slots)))

    def start_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> RunningCopy:
        return _Late(lambda: self._move(lambda: self._copies.start_in(slots, block_ids)))

    def close(self) -> None:
        self._copies.close()

    def _move(self, start: Callable[[], RunningCopy]) -> None:
        time.sleep(self._late_s)
        start().wait()


class HeldCopies(LateCopies):
    """Copies end when the test says: each needs one `go_on`. num_waiting: copies that somebody waits for now"""

    def __init__(self, copies: DeviceCopies) -> None:
        super().__init__(copies)
        self.num_waiting = 0
        self.failure: Exception | None = None
        self._may_go_on = threading.Semaphore(0)

    def go_on(self, num_copies: int = 1) -> None:
        self._may_go_on.release(num_copies)

    def fail(self, failure: Exception) -> None:
        """The next copy, and every other one, fails."""
        self.failure = failure
        self._may_go_on.release()

    def _move(self, start: Callable[[], RunningCopy]) -> None:
        self.num_waiting += 1
        assert self._may_go_on.acquire(timeout=HANG_S), "the test never let the copy go on"
        self.num_waiting -= 1
        if self.failure is not None:
            raise self.failure
        start().wait()
