"""Philox4x32-10: a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

No state: the same (key, counter) always gives the same words. That is what lets another worker take over a stream.
"""

from __future__ import annotations

_ROUNDS = 10
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_MASK_32 = 0xFFFFFFFF

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Four 32-bit words of chance out of four words of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0 = (k0 + _WEYL_0) & _MASK_32
        k1 = (k1 + _WEYL_1) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on (seed, position) alone.

    seed:     any integer; its lowest 64 bits are the key
    position: absolute position of the drawn token; its lowest 64 bits are the counter
    """
    key = (seed & _MASK_32, (seed >> 32) & _MASK_32)
    high, low, _, _ = philox4x32((position & _MASK_32, (position >> 32) & _MASK_32, 0, 0), key)
    return ((high << 21) | (low >> 11)) / float(1 << 53)
