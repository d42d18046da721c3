"""Which blocks a range of tokens touches. Pure."""

from __future__ import annotations

from pd_core.layout import BLOCK_TOKENS


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold the KV of `num_tokens` positions from 0 on."""
    return -(-num_tokens // BLOCK_TOKENS)


def blocks_done(end: int, num_tokens: int) -> int:
    """Blocks, from the first on, that are final when positions 0 .. end - 1 of a prompt of `num_tokens` are computed.

    A block in the middle of the prompt is final when it is full; the last one when the prompt is done.
    """
    return blocks_for(end) if end == num_tokens else end // BLOCK_TOKENS
