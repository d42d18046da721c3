"""The bytes of one pool."""

from __future__ import annotations

import os

from kv_transport.shm_pool import PoolFile
from pd_worker.huge_pages import HugePages


class PoolMemory:
    """BlockMemory, zero at first, that other processes of this host can be given to read; none but ours writes.

    Pages are taken from the machine as they are first used, and become huge ones soon after (see huge_pages).
    Use `close` when engine and transport are closed. Views that are left keep the pages until they go too.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks < 1 or block_bytes < 1:
            raise ValueError(f"a pool has blocks and a block has bytes, not {num_blocks} of {block_bytes}")
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        file = PoolFile(num_blocks, block_bytes)
        self._blocks: memoryview | None = file.blocks
        self._fd = file.fd
        self._nonce = file.nonce
        self._huge_pages = HugePages(file.fd, file.blocks)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def buffer(self) -> memoryview:
        """All blocks: writable, contiguous, format "B". Raises ValueError after `close`."""
        if self._blocks is None:
            raise ValueError("the pool is closed")
        return self._blocks

    @property
    def fd(self) -> int:
        """Of the pool's file; see kv_transport.shm_pool."""
        return self._fd

    @property
    def nonce(self) -> bytes:
        return self._nonce

    def block(self, block_id: int) -> memoryview:
        """The bytes of one block. Raises IndexError outside 0 <= block_id < num_blocks."""
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} is outside the pool of {self._num_blocks}")
        return self.buffer[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]

    def close(self) -> None:
        """Gives the memory back with the last view of it. May be called twice."""
        if self._blocks is not None:
            self._blocks = None
            self._huge_pages.close()
            os.close(self._fd)
