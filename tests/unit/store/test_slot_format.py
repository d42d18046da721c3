"""The bytes on the disk, as docs/store-format.md says them."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kv_store.slot_format import (
    EMPTY_HEADER,
    HEADER_BYTES,
    PAGE_BYTES,
    BadBytes,
    SetPage,
    SlotHeader,
    header_offset,
    pack_header,
    pack_set_page,
    set_bytes,
    set_page,
    unpack_header,
    unpack_headers,
    whole_slots,
)
from pd_core.layout import BlockLayout, Fingerprint

FINGERPRINT = Fingerprint("w", "s", "t", "n", BlockLayout("rows", 30, 3, 64, "bfloat16"))
PAGE = set_page(FINGERPRINT)
NAME, PARENT = bytes(range(16)), bytes(range(16, 32))
HEADER = SlotHeader(NAME, PARENT, 7, 0x1122334455667788, 368_640, 99)

names = st.binary(min_size=16, max_size=16)
headers = st.builds(
    SlotHeader,
    name=names,
    parent=names,
    position=st.integers(0, 2**32 - 1),
    digest=st.integers(0, 2**64 - 1),
    num_bytes=st.integers(1, 368_640),
    sequence=st.integers(0, 2**64 - 1),
)
slots = st.integers(0, 2**32 - 1)


def test_a_header_has_the_documented_bytes() -> None:
    body = (
        b"KVSL"
        + struct.pack("<HHIIII", 1, 0, 5, 368_640, 7, 0)
        + struct.pack("<Q", 99)
        + NAME
        + PARENT
        + PAGE.set_id
        + bytes.fromhex("8877665544332211")
        + bytes(32)
    )
    assert pack_header(HEADER, 5, PAGE.set_id) == body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    assert len(body) == HEADER_BYTES - 8
    assert 512 % HEADER_BYTES == 0 and PAGE_BYTES % HEADER_BYTES == 0  # never across two sectors


def test_a_set_page_has_the_documented_bytes() -> None:
    text = (
        b'{"weights":"w","settings":"s","tokenizer":"t","numerics":"n","layout":'
        b'{"name":"rows","num_layers":30,"num_kv_heads":3,"head_dim":64,"dtype":"bfloat16"}}'
    )
    assert PAGE.fingerprint == text
    assert PAGE.set_id.hex() == "d0679c728b78d083aa987bf5304f6a30"
    body = b"KVSLOTS\0" + struct.pack("<HHIII", 1, 0, 368_640, 368_640, 128) + PAGE.set_id
    body = (body + struct.pack("<I", len(text)) + text).ljust(4088, b"\0")
    assert pack_set_page(PAGE) == body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_a_block_of_odd_size_has_a_slot_of_whole_pages() -> None:
    assert [SetPage(NAME, size, b"").slot_bytes for size in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_a_fingerprint_that_no_page_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 4044"):
        set_page(Fingerprint("w" * 4000, "s", "t", "n", FINGERPRINT.layout))


@given(headers, slots)
def test_what_was_packed_is_unpacked(header: SlotHeader, slot: int) -> None:
    assert unpack_header(pack_header(header, slot, PAGE.set_id), slot, PAGE) == header


@given(headers, slots, slots, names)
def test_a_header_is_none_in_another_slot_or_set(header: SlotHeader, slot: int, other: int, set_id: bytes) -> None:
    packed = pack_header(header, slot, PAGE.set_id)
    if other != slot:
        assert isinstance(unpack_header(packed, other, PAGE), BadBytes)
    if set_id != PAGE.set_id:
        assert isinstance(unpack_header(pack_header(header, slot, set_id), slot, PAGE), BadBytes)


@given(headers, slots, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_one_bit_flipped_is_none(header: SlotHeader, slot: int, bit: int) -> None:
    packed = bytearray(pack_header(header, slot, PAGE.set_id))
    packed[bit // 8] ^= 1 << bit % 8
    assert isinstance(unpack_header(bytes(packed), slot, PAGE), BadBytes)


@given(headers, slots, st.integers(1, HEADER_BYTES - 1))
def test_a_header_written_in_part_over_an_empty_one_is_none(header: SlotHeader, slot: int, num_bytes: int) -> None:
    packed = pack_header(header, slot, PAGE.set_id)
    torn = packed[:num_bytes] + EMPTY_HEADER[num_bytes:]
    if torn != packed:
        assert isinstance(unpack_header(torn, slot, PAGE), BadBytes)
    assert isinstance(unpack_header(packed[:num_bytes], slot, PAGE), BadBytes)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_is_no_header(raw: bytes) -> None:
    found = unpack_header(raw, 0, PAGE)
    assert found is None if raw == EMPTY_HEADER else isinstance(found, BadBytes)


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("flags", 1), ("num_bytes", 0), ("num_bytes", 368_641)])
def test_a_header_with_a_right_checksum_and_a_wrong_field_is_none(field: str, value: int) -> None:
    body = bytearray(pack_header(HEADER, 5, PAGE.set_id)[:-8])
    struct.pack_into(
        *{"version": ("<H", body, 4), "flags": ("<H", body, 6), "num_bytes": ("<I", body, 12)}[field], value
    )
    raw = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    assert isinstance(unpack_header(raw, 5, PAGE), BadBytes)


def test_of_many_headers_the_empty_ones_are_passed_over() -> None:
    raw = EMPTY_HEADER + pack_header(HEADER, 1, PAGE.set_id) + b"x" * HEADER_BYTES + b"half"
    assert list(unpack_headers(raw, PAGE)) == [(1, HEADER), (2, BadBytes("the checksum does not fit"))]


@given(st.integers(0, 10**6), st.integers(1, 1000).map(lambda pages: pages * PAGE_BYTES), st.data())
def test_files_of_so_many_slots_have_so_many_whole(num_slots: int, slot_bytes: int, data: st.DataObject) -> None:
    headers_bytes, bodies_bytes = header_offset(num_slots), num_slots * slot_bytes
    assert headers_bytes + bodies_bytes == set_bytes(num_slots, slot_bytes)
    assert whole_slots(headers_bytes, bodies_bytes, slot_bytes) == num_slots
    cut = data.draw(st.integers(0, bodies_bytes))
    assert whole_slots(headers_bytes, cut, slot_bytes) == cut // slot_bytes
    cut = data.draw(st.integers(0, headers_bytes))
    assert whole_slots(cut, bodies_bytes, slot_bytes) == max(0, (cut - PAGE_BYTES) // HEADER_BYTES)
