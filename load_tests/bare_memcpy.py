"""memcpy: one copy of each block within one process. What no way to move KV can do without."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from load_tests.transfer_halves import Pool
from load_tests.transfer_messages import Sent

memmove = ctypes.memmove
"""libc's, called without the interpreter lock and with as little around it as Python allows."""


def address_of(view: memoryview) -> int:
    """Of its first byte, also when it is read-only."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class MemcpySource:
    """SourceHalf without a target."""

    def __init__(self, pool: Pool) -> None:
        self._copy = Pool(pool.shape)
        self._copy.wipe()
        self._num_bytes = pool.shape.block_bytes
        self._pairs = [
            (address_of(to), address_of(source)) for to, source in zip(self._copy.blocks, pool.blocks, strict=True)
        ]

    async def connect(self, offer: str) -> None:
        """There is nobody."""

    async def send(self, note: str) -> Sent:
        num_bytes = self._num_bytes
        began_s = time.monotonic()
        for to, source in self._pairs:
            memmove(to, source, num_bytes)
        return Sent(began_s, time.monotonic())

    async def close(self) -> None:
        self._copy.close()
