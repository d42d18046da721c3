"""The two halves of a way to move KV, as the bench's processes use them, and the memory that they share.

`open` of the target comes first, then `connect` of the source, then pairs of `receive` and `send`, one at a time; only
`send` for a way that the source times. All halves of a process belong to its one event loop; those that
block do so in it, where nothing else waits to be done. None of them waits longer than PUSH_S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from load_tests.transfer_messages import Sent
from load_tests.transfer_ways import Shape
from pd_worker.memory import PoolMemory

PUSH_S = 10.0
HOST = "127.0.0.1"
PATTERN_SEED = 4


class SourceHalf(Protocol):
    async def connect(self, offer: str) -> None: ...

    async def send(self, note: str) -> Sent: ...

    async def close(self) -> None: ...


class Offerer(Protocol):
    """The target's half of a way that the source times: it takes what comes, or answers, by itself."""

    async def open(self) -> str:
        """What the source has to know."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class TargetHalf(Offerer, Protocol):
    async def receive(self, say_ready: Callable[[str], None]) -> float:
        """When all blocks were in place. `say_ready` is called with a note for the source once they may come."""
        ...


class Pool:
    """The memory of one shape, shared by all ways of a process."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.memory = PoolMemory(shape.num_blocks, shape.block_bytes)

    @property
    def buffer(self) -> memoryview:
        return self.memory.buffer

    @property
    def blocks(self) -> list[memoryview]:
        return [self.memory.block(block_id) for block_id in range(self.shape.num_blocks)]

    def fill(self) -> None:
        """What is in every source's pool; the kernel has given it all its pages then."""
        self.buffer[:] = _pattern(self.shape)

    def wipe(self) -> None:
        """The same for a target's."""
        self.buffer[:] = bytes(len(self.buffer))

    def is_filled(self) -> bool:
        return bytes(self.buffer) == _pattern(self.shape)

    def close(self) -> None:
        self.memory.close()


def _pattern(shape: Shape) -> bytes:
    """Every block another, and no two pieces of one alike."""
    return np.random.default_rng(PATTERN_SEED).bytes(shape.num_bytes)
