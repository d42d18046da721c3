"""The digest that travels and stays with a block."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import overload

import xxhash


def block_digest(block: memoryview) -> int:
    """xxh3-64 of a block's canonical bytes, 0 <= digest < 2**64. It finds accidents; it is no protection from malice.

    The interpreter lock is released while it computes (360 KiB: some 6 us in the cache, 20 us from memory). A caller
    beside a busy Python thread therefore waits for its turn after every block.
    """
    return xxhash.xxh3_64_intdigest(block)


class BlockDigests(Sequence[int]):
    """Digests of blocks, each made when it is first asked for: by the thread that sends the blocks, while those before
    them are on their way. What is made is kept in `known`, by the block's key, for whoever asks again.

    A slice is such a sequence too, and makes none.
    """

    def __init__(
        self, blocks: Sequence[memoryview], keys: Sequence[int], known: MutableMapping[int, int] | None = None
    ) -> None:
        self._blocks = blocks
        self._keys = keys
        self._known: MutableMapping[int, int] = {} if known is None else known

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, slice):
            return BlockDigests(self._blocks[place], self._keys[place], self._known)
        key = self._keys[place]
        digest = self._known.get(key)
        if digest is None:
            digest = self._known[key] = block_digest(self._blocks[place])
        return digest
