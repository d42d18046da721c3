"""How KV lies in memory, how much room it needs, and what two pools must agree on before they exchange it."""

from __future__ import annotations

from typing import Literal

import msgspec

from pd_core.errors import LayoutMismatch

BLOCK_TOKENS = 16
"""B: tokens in one KV block."""


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold the KV of positions 0 .. num_tokens - 1."""
    return -(-num_tokens // BLOCK_TOKENS)


GROWTH_BLOCKS = 2
"""Room that is left for each sequence when another one comes: it grows that far without preempting anybody."""


def growth_room(num_blocks: int, num_most_blocks: int) -> int:
    """Free blocks that are kept for a sequence that has `num_blocks`, or is about to take them, and can never have more
    than `num_most_blocks`: by the decode worker that admits another, and by the router that foresees what it says."""
    return min(GROWTH_BLOCKS, max(0, num_most_blocks - num_blocks))


DType = Literal["float32", "bfloat16", "uint8"]
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "uint8": 1}


class BlockLayout(msgspec.Struct, frozen=True):
    """One block: a contiguous piece over all layers, `[layer][kv_head][k|v][16 tokens x head_dim]`.

    name: the arrangement inside one head's K or V, chosen by the attention kernel
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType

    @property
    def block_bytes(self) -> int:
        elements = self.num_layers * self.num_kv_heads * 2 * BLOCK_TOKENS * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]


class Fingerprint(msgspec.Struct, frozen=True):
    """What made a block's bytes. Blocks are exchanged between equal fingerprints only.

    weights:   digest of the weights' bytes
    settings:  digest of everything of the architecture that changes KV: rope, norm, attention settings
    tokenizer: digest of the tokenizer
    numerics:  kernel, version, instruction set, tile sizes (see pd_engine)
    """

    weights: str
    settings: str
    tokenizer: str
    numerics: str
    layout: BlockLayout


def check_pairing(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Raises LayoutMismatch naming each part that differs, with both values."""
    differences = [
        f"{field}: ours {getattr(ours, field)!r}, theirs {getattr(theirs, field)!r}"
        for field in Fingerprint.__struct_fields__
        if getattr(ours, field) != getattr(theirs, field)
    ]
    if differences:
        raise LayoutMismatch("KV of these two workers cannot be exchanged: " + "; ".join(differences))
