"""Copies between the blocks of a pool on a device and the slots of host memory that transports read and write.

Implemented in pd_engine. A copy runs beside the engine's steps: whoever starts one sees to it that no step writes into
its blocks, and that its slots are left alone, until it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RunningCopy(Protocol):
    """A copy that has been started."""

    def wait(self) -> None:
        """Returns when its bytes are where they were to go, for every reader. Raises EngineError: the device failed."""
        ...


class DeviceCopies(Protocol):
    """Of one pool and one ring of slots. All methods are called by one thread; block i goes with slot i of the lists.

    Raises EngineError when the device fails; what it was copying is in an unknown state then.
    """

    def start_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> RunningCopy:
        """From the device into the slots."""
        ...

    def start_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> RunningCopy:
        """From the slots onto the device."""
        ...

    def close(self) -> None:
        """Lets go of the slots' memory. No copy is running."""
        ...
