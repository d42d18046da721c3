"""The digest that travels and stays with a block."""

from __future__ import annotations

import xxhash


def block_digest(block: memoryview) -> int:
    """xxh3-64 of a block's canonical bytes, 0 <= digest < 2**64. It finds accidents; it is no protection from malice.

    The interpreter lock is released while it computes (360 KiB: some 6 us in the cache, 20 us from memory). A caller
    beside a busy Python thread therefore waits for its turn after every block.
    """
    return xxhash.xxh3_64_intdigest(block)
