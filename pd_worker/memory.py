"""The bytes of one pool."""

from __future__ import annotations

import contextlib
import mmap


class PoolMemory:
    """BlockMemory in anonymous private memory, zero at first; in huge pages where the kernel has them to give.

    Use `close` when engine and transport are closed. Views that are left keep the pages until they go too.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks < 1 or block_bytes < 1:
            raise ValueError(f"a pool has blocks and a block has bytes, not {num_blocks} of {block_bytes}")
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._map = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: the pool works in small ones
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def buffer(self) -> memoryview:
        """All blocks: writable, contiguous, format "B"."""
        return self._view

    def block(self, block_id: int) -> memoryview:
        """The bytes of one block. Raises IndexError outside 0 <= block_id < num_blocks."""
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} is outside the pool of {self._num_blocks}")
        return self._view[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]

    def close(self) -> None:
        """Gives the memory back, now or with the last view of it. May be called twice."""
        with contextlib.suppress(BufferError):  # an engine still has its view: the pages go when it goes
            self._view.release()
            self._map.close()
