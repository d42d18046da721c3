"""Names of KV blocks: a keyed hash chain over token ids, full blocks only.

    root = H(key=salt, person="kvrelay-root-v01", fingerprint)
    name of block 0 = H(key=root, person="kvrelay-block-v1", root   || ids of tokens  0 .. 15)
    name of block i = H(key=root, person="kvrelay-block-v1", name of block i - 1 || ids of tokens 16i .. 16i + 15)

H is blake2b (RFC 7693) with a digest of 16 bytes; `key` and `person` are its own parameters, without salt. A name
stands for all tokens up to the end of its block, for whose they are (salt) and for what made the KV (fingerprint):
two blocks with one name have the same bytes and may be shared, all others may not. Whoever lacks the root can neither
make a name nor go on from one. Workers and stores see roots and names, never salts.

To the byte, all integers little-endian:

    ids             16 x u32, 64 bytes
    fingerprint     text(weights) text(settings) text(tokenizer) text(numerics)
                    text(layout.name) u32(layout.num_layers) u32(layout.num_kv_heads) u32(layout.head_dim)
                    text(layout.dtype) u32(B = 16)
    text(t)         u32(number of bytes) and the bytes of t in UTF-8
    person          its 16 characters in ASCII
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from pd_core.layout import BLOCK_TOKENS, Fingerprint

NAME_BYTES = 16
"""Length of a root and of every name."""
MIN_SALT_BYTES = 16
MAX_SALT_BYTES = 64
"""What blake2b takes as a key."""
MAX_TOKEN_ID = 2**32 - 1

_ROOT_PERSON = b"kvrelay-root-v01"
_BLOCK_PERSON = b"kvrelay-block-v1"
_IDS = struct.Struct(f"<{BLOCK_TOKENS}I")
_U32 = struct.Struct("<I")


def prefix_root(fingerprint: Fingerprint, salt: bytes) -> bytes:
    """The root of one tenant's names for KV of this fingerprint: 16 bytes, to be kept as secret as what it guards.

    salt: the tenant's secret, 16 .. 64 random bytes. Raises ValueError for another length.
    """
    if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
        raise ValueError(f"a salt has {MIN_SALT_BYTES} to {MAX_SALT_BYTES} bytes, not {len(salt)}")
    data = _fingerprint_bytes(fingerprint)
    return hashlib.blake2b(data, digest_size=NAME_BYTES, key=salt, person=_ROOT_PERSON).digest()


def prefix_hashes(root: bytes, tokens: Sequence[int], first_block: int = 0, parent: bytes | None = None) -> list[bytes]:
    """Names of the full blocks `first_block`, `first_block + 1`, ... of the sequence `tokens`, 16 bytes each.

    tokens: the whole sequence from position 0 on, 0 <= id < 2**32; a last block that is not full has no name
    parent: name of block first_block - 1; None for first_block 0 alone

    Raises ValueError when `root` or `parent` is none, or an id is out of range.
    """
    _check_name(root, "root")
    if first_block < 0 or (parent is None) != (first_block == 0):
        raise ValueError(f"block {first_block} {'has no' if first_block <= 0 else 'needs a'} parent")
    parent = root if parent is None else parent
    _check_name(parent, "parent")
    return _chain(root, parent, tokens[first_block * BLOCK_TOKENS :])


class PrefixChain:
    """The names of one sequence that grows: equal to `prefix_hashes` of all its tokens, each block hashed once."""

    def __init__(self, root: bytes) -> None:
        _check_name(root, "root")
        self._root = root
        self._names: list[bytes] = []
        self._open: list[int] = []
        """Ids after the last full block, fewer than 16."""

    @property
    def names(self) -> Sequence[bytes]:
        """Of all full blocks so far."""
        return self._names

    @property
    def num_tokens(self) -> int:
        return len(self._names) * BLOCK_TOKENS + len(self._open)

    def parent_of(self, block: int) -> bytes:
        """Name of the block before `block`, 0 <= block <= len(names); the root before the first."""
        if not 0 <= block <= len(self._names):
            raise ValueError(f"block {block} is outside a chain of {len(self._names)}")
        return self._names[block - 1] if block else self._root

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Names of the blocks that these tokens fill. Raises ValueError (and adds none) when an id is out of range."""
        run = [*self._open, *tokens]
        num_full = len(run) - len(run) % BLOCK_TOKENS
        _check_ids(run[num_full:])
        made = _chain(self._root, self.parent_of(len(self._names)), run)
        self._names.extend(made)
        self._open = run[num_full:]
        return made


def _chain(root: bytes, parent: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Names of the full blocks of `tokens`, which begin right after the block `parent`."""
    keyed = hashlib.blake2b(digest_size=NAME_BYTES, key=root, person=_BLOCK_PERSON)
    names: list[bytes] = []
    try:
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            link = keyed.copy()  # so that the key is digested once
            link.update(parent + _IDS.pack(*tokens[start : start + BLOCK_TOKENS]))
            parent = link.digest()
            names.append(parent)
    except struct.error as error:
        raise ValueError(f"a token id is none: {error}") from error
    return names


def _fingerprint_bytes(fingerprint: Fingerprint) -> bytes:
    layout = fingerprint.layout
    return b"".join(
        (
            *map(_text, (fingerprint.weights, fingerprint.settings, fingerprint.tokenizer, fingerprint.numerics)),
            _text(layout.name),
            *map(_U32.pack, (layout.num_layers, layout.num_kv_heads, layout.head_dim)),
            _text(layout.dtype),
            _U32.pack(BLOCK_TOKENS),
        )
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return _U32.pack(len(data)) + data


def _check_name(name: bytes, what: str) -> None:
    if len(name) != NAME_BYTES:
        raise ValueError(f"a {what} has {NAME_BYTES} bytes, not {len(name)}")


def _check_ids(tokens: Sequence[int]) -> None:
    wrong = [token for token in tokens if not 0 <= token <= MAX_TOKEN_ID]
    if wrong:
        raise ValueError(f"a token id is none: {wrong[0]}")
