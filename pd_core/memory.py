"""A pool's memory as everybody sees it who may touch it."""

from __future__ import annotations

from typing import Protocol


class BlockPool(Protocol):
    """Blocks as a ledger counts them, wherever they lie."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


class BlockMemory(BlockPool, Protocol):
    """`num_blocks` KV blocks of `block_bytes` bytes each, one after the other.

    Allocated by the worker, handed as a plain buffer to the engine and to the transports; neither knows the other.
    """

    @property
    def buffer(self) -> memoryview:
        """All blocks: writable, contiguous, format "B", `num_blocks * block_bytes` bytes."""
        ...

    def block(self, block_id: int) -> memoryview:
        """The bytes of one block. Raises IndexError outside 0 <= block_id < num_blocks."""
        ...
