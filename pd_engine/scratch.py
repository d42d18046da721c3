"""A pool's memory in this process alone: for the engine's check of itself, and for tests."""

from __future__ import annotations


class ScratchMemory:
    """`num_blocks` zeroed blocks of `block_bytes`; see `pd_core.memory.BlockMemory`."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._buffer = memoryview(bytearray(num_blocks * block_bytes))

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def block(self, block_id: int) -> memoryview:
        """Raises IndexError outside 0 <= block_id < num_blocks."""
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} of {self._num_blocks}")
        return self._buffer[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]
