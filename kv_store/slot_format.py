"""What lies on the disk: the set page and the slot headers, to the byte. docs/store-format.md says the same in prose.

One fingerprint's KV is a *set* of two files. In `headers` the set page comes first, then 128 bytes for each slot, so
that an index of many GiB is read in one piece; `bodies` holds the blocks, slot after slot, each on page boundaries:

    headers   | set page 4096 | header 0 | header 1 | ...        bodies   | slot 0 | slot 1 | ...

A header never crosses a sector of 512 bytes, so a power cut leaves it old or new, and no neighbour is harmed. All
integers are little-endian. Slot and set stand in the header and under its checksum: a header that was copied to
another place is no header there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b

import msgspec
import xxhash

from pd_core.layout import Fingerprint

FORMAT_VERSION = 1
PAGE_BYTES = 4096
HEADER_BYTES = 128
NAME_BYTES = 16
MAX_POSITION = 2**32 - 1
MAX_SLOTS = 2**32
EMPTY_HEADER = bytes(HEADER_BYTES)

_HEADER_MAGIC = b"KVSL"
_HEADER = struct.Struct("<4sHHIIIIQ16s16s16sQ32x")  # and the checksum
_PAGE_MAGIC = b"KVSLOTS\0"
_PAGE = struct.Struct("<8sHHIII16sI")  # then the fingerprint as JSON, zeros, and the checksum
_CHECKSUM = struct.Struct("<Q")
_MAX_TEXT_BYTES = PAGE_BYTES - _PAGE.size - _CHECKSUM.size


class SlotHeader(msgspec.Struct, frozen=True):
    """What a slot holds.

    name, parent: prefix hashes of the block and of the one before it; for the first one the tenant's root
    position:     number of the block in its sequence; 0 is the first, whose parent is no block
    digest:       xxh3-64 of the body's first `num_bytes`
    sequence:     grows with each write into the set
    """

    name: bytes
    parent: bytes
    position: int
    digest: int
    num_bytes: int
    sequence: int


class SetPage(msgspec.Struct, frozen=True):
    """What a set holds. `fingerprint` is its JSON, for people and to be compared."""

    set_id: bytes
    block_bytes: int
    fingerprint: bytes

    @property
    def slot_bytes(self) -> int:
        """Room for one block in `bodies`: whole pages."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES


class BadBytes(msgspec.Struct, frozen=True):
    """Bytes that are neither empty nor anything this version has written at this place."""

    reason: str


def set_page(fingerprint: Fingerprint) -> SetPage:
    """The page of the set that holds KV of this fingerprint. Raises ValueError for one that no page can hold."""
    text = msgspec.json.encode(fingerprint, order="deterministic")
    if len(text) > _MAX_TEXT_BYTES:
        raise ValueError(f"the fingerprint has {len(text)} bytes as JSON; a set page has room for {_MAX_TEXT_BYTES}")
    set_id = blake2b(text, digest_size=NAME_BYTES, person=b"kvrelay-set").digest()
    return SetPage(set_id, fingerprint.layout.block_bytes, text)


def pack_set_page(page: SetPage) -> bytes:
    """PAGE_BYTES bytes."""
    sizes = (page.block_bytes, page.slot_bytes, HEADER_BYTES)
    text = page.fingerprint
    start = _PAGE.pack(_PAGE_MAGIC, FORMAT_VERSION, 0, *sizes, page.set_id, len(text)) + text
    body = start.ljust(PAGE_BYTES - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def pack_header(header: SlotHeader, slot: int, set_id: bytes) -> bytes:
    """HEADER_BYTES bytes, valid in this slot of this set only."""
    body = _HEADER.pack(
        _HEADER_MAGIC,
        FORMAT_VERSION,
        0,
        slot,
        header.num_bytes,
        header.position,
        0,
        header.sequence,
        header.name,
        header.parent,
        set_id,
        header.digest,
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack_header(raw: bytes | memoryview, slot: int, page: SetPage) -> SlotHeader | BadBytes | None:
    """What stands in the slot; None when it is empty. Of what only a fault can have written it says what is wrong."""
    raw = bytes(raw)
    if raw == EMPTY_HEADER:
        return None
    if len(raw) != HEADER_BYTES:
        return BadBytes(f"a header of {len(raw)} bytes")
    body, checksum = raw[: _HEADER.size], raw[_HEADER.size :]
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) != checksum:
        return BadBytes("the checksum does not fit")
    magic, version, flags, at, num_bytes, position, more, sequence, name, parent, set_id, digest = _HEADER.unpack(body)
    if (magic, version, flags, more) != (_HEADER_MAGIC, FORMAT_VERSION, 0, 0):
        return BadBytes(f"magic {magic!r}, version {version}, flags {flags:#x}")
    if (at, set_id) != (slot, page.set_id):
        return BadBytes(f"it was written for slot {at} of set {set_id.hex()}")
    if not 0 < num_bytes <= page.block_bytes:
        return BadBytes(f"a block of {num_bytes} bytes")
    return SlotHeader(name, parent, position, digest, num_bytes, sequence)


def unpack_headers(raw: bytes, page: SetPage) -> Iterator[tuple[int, SlotHeader | BadBytes]]:
    """All slots that are not empty, of the headers of slots 0, 1, ... one after the other."""
    view = memoryview(raw)
    for slot in range(len(raw) // HEADER_BYTES):
        found = unpack_header(view[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES], slot, page)
        if found is not None:
            yield slot, found


def header_offset(slot: int) -> int:
    """Where the slot's header begins in `headers`."""
    return PAGE_BYTES + slot * HEADER_BYTES


def whole_slots(headers_bytes: int, bodies_bytes: int, slot_bytes: int) -> int:
    """How many slots files of these sizes have whole."""
    return max(0, min((headers_bytes - PAGE_BYTES) // HEADER_BYTES, bodies_bytes // slot_bytes, MAX_SLOTS))


def set_bytes(num_slots: int, slot_bytes: int) -> int:
    """Size of both files of a set together."""
    return header_offset(num_slots) + num_slots * slot_bytes
