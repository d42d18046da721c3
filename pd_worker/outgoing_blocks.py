"""How blocks of a worker's pool are shown to the transport that is to send them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from pd_core.memory import BlockPool


class OutgoingBlocks(BlockPool, Protocol):
    """The pool that blocks are sent from."""

    @property
    def most_at_once(self) -> int | None:
        """Most blocks of one `shown`; None where there is no limit."""
        ...

    def shown(self, block_ids: Sequence[int], within_s: float) -> AbstractAsyncContextManager[Sequence[int]]:
        """Inside, the transport's memory has the bytes of these blocks, in the blocks that are given.

        When it is left, also by cancellation or a failure, nothing reads the pool's blocks for it any more.
        Raises DeadlineExceeded when there was no room for them within `within_s`, EngineError when the device fails.
        """
        ...


class DirectBlocks:
    """The pool is the memory that the transport reads."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._pool.block_bytes

    @property
    def most_at_once(self) -> None:
        return None

    def shown(self, block_ids: Sequence[int], within_s: float) -> AbstractAsyncContextManager[Sequence[int]]:
        return nullcontext(block_ids)
