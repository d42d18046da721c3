"""What is said on UCX connections; and that the format is the one that is written down."""

import itertools
import struct
import zlib
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transport.doorbell_frames import MAX_BODY_BYTES, MAX_FRAME_BLOCKS, Attached, Refused, Taken, decode, encode
from kv_transport.ucx_frames import (
    FROM_RECEIVER,
    FROM_SENDER,
    Attach,
    Doorbell,
    Ready,
    Welcome,
    check_address,
    check_attach,
    check_doorbell,
    check_ready,
    doorbells,
)
from pd_core.errors import ProtocolError
from pd_core.ticket import TicketRef
from pd_rpc.frames import WIRE_VERSION, FrameReader

REF = TicketRef("t-1", "boot", 7, 2)
BELL = Doorbell(4, REF, [3, 300], [2**64 - 1, 5], 2**40)
RECORDED = bytes.fromhex(
    "4b56525000020000007e0440756e"
    "86a474797065a8646f6f7262656c6ca66e756d62657204a372656684a97469636b65745f6964a3742d31ab696e6361726e61"
    "74696f6ea4626f6f74a565706f636807a7617474656d707402a7696e64696365739203cd012ca76469676573747392cfffff"
    "ffffffffffff05a966697273745f746167cf0000010000000000"
)
"""Of BELL; also in docs/wire-format.md."""

DOCUMENT = Path(__file__).parents[3] / "docs" / "wire-format.md"


def plain(frame: bytes) -> object:
    """A frame's body with nothing of ours."""
    magic, version, num_bytes, crc = struct.unpack(">4sHII", frame[:14])
    assert (magic, version, num_bytes, crc) == (b"KVRP", WIRE_VERSION, len(frame) - 14, zlib.crc32(frame[14:]))
    return msgpack.unpackb(frame[14:])


def test_the_doorbell_in_the_documentation_is_what_is_sent():
    lines = DOCUMENT.read_text().partition("whose first block has the tag 2^40.\n\n")[2].splitlines()
    example = itertools.takewhile(lambda line: line.startswith("    "), lines)
    assert bytes.fromhex("".join(example)) == RECORDED
    assert encode(BELL) == RECORDED


def test_every_message_can_be_read_with_nothing_but_msgpack():
    ref = {"ticket_id": "t-1", "incarnation": "boot", "epoch": 7, "attempt": 2}
    bell = {"type": "doorbell", "number": 4, "ref": ref, "indices": [3, 300], "digests": [2**64 - 1, 5]}
    assert plain(RECORDED) == bell | {"first_tag": 2**40}
    attach = {"type": "attach", "version": 1, "block_bytes": 8192, "address": b"a", "nonce": bytes(16)}
    assert plain(encode(Attach(1, 8192, b"a", bytes(16)))) == attach
    assert plain(encode(Welcome(b"b", 5))) == {"type": "welcome", "address": b"b", "first_tag": 5}
    assert plain(encode(Attached())) == {"type": "attached"}
    assert plain(encode(Ready(4, [0, 2]))) == {"type": "ready", "number": 4, "wanted": [0, 2]}
    assert plain(encode(Taken(4))) == {"type": "taken", "number": 4}
    assert plain(encode(Refused("why"))) == {"type": "refused", "reason": "why"}


def test_each_side_takes_the_others_words_alone():
    for word in (Welcome(b"b", 5), Attached(), Ready(1, []), Taken(1), Refused("why")):
        assert decode(FROM_RECEIVER, encode(word)[14:]) == word
        with pytest.raises(ProtocolError):
            decode(FROM_SENDER, encode(word)[14:])
    for word in (Attach(1, 8192, b"a", bytes(16)), BELL):
        assert decode(FROM_SENDER, encode(word)[14:]) == word
        with pytest.raises(ProtocolError):
            decode(FROM_RECEIVER, encode(word)[14:])


@given(st.binary(max_size=200))
def test_no_bytes_but_a_message_are_read_as_one(body):
    for decoder in (FROM_SENDER, FROM_RECEIVER):
        try:
            message = decode(decoder, body)
        except ProtocolError:
            continue
        assert decode(decoder, msgspec.msgpack.encode(message)) == message


@given(
    st.integers(1, 60).flatmap(lambda count: st.lists(st.integers(0, 2**32), min_size=count, max_size=count)),
    st.booleans(),
    st.integers(1, 20),
    st.integers(1, 1000),
    st.integers(0, 2**40),
)
def test_a_push_is_rung_whole_in_turn_and_no_tag_comes_twice(indices, with_digests, most_blocks, number, first_tag):
    digests = [index + 1 for index in indices] if with_digests else []
    bells = doorbells(REF, indices, digests, most_blocks, number, first_tag)
    assert [index for bell in bells for index in bell.indices] == indices
    assert [digest for bell in bells for digest in bell.digests] == digests
    for bell in bells:
        check_doorbell(bell, number, first_tag, most_blocks)
        number, first_tag = number + 1, first_tag + len(bell.indices)


def test_the_largest_doorbell_fits_a_frame():
    ref = TicketRef("t" * 128, "i" * 128, 2**63 - 1, 2**31)
    bell = Doorbell(2**40, ref, [2**32] * MAX_FRAME_BLOCKS, [2**64 - 1] * MAX_FRAME_BLOCKS, 2**63 - 1)
    reader = FrameReader(MAX_BODY_BYTES)
    reader.feed(encode(bell))
    body = reader.next_body()
    assert body is not None
    assert decode(FROM_SENDER, body) == bell


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [((5, 2**40, 2), "5 was next"), ((4, 2**40 + 1, 2), "is the next"), ((4, 2**40, 1), "at most 1")],
)
def test_a_doorbell_out_of_turn_or_too_large_is_refused_naming_both_values(arguments, reason):
    check_doorbell(BELL, 4, 2**40, 2)
    with pytest.raises(ProtocolError, match=reason):
        check_doorbell(BELL, *arguments)


@pytest.mark.parametrize("wanted", [[2], [-1], [1, 0], [0, 0], [0, 1, 2]])
def test_only_places_of_the_doorbell_can_be_wanted_each_once_in_order(wanted):
    for right in ([], [0], [1], [0, 1]):
        check_ready(Ready(4, right), BELL)
    with pytest.raises(ProtocolError, match="are wanted of 2 blocks"):
        check_ready(Ready(4, wanted), BELL)
    with pytest.raises(ProtocolError, match="4 was rung"):
        check_ready(Ready(5, []), BELL)


def test_a_sender_of_another_version_block_size_or_ucx_is_refused_naming_both_values():
    attach = Attach(1, 8192, b"\x20 theirs", bytes(16))
    check_attach(attach, 8192, b"\x20 ours")
    with pytest.raises(ProtocolError, match="ours 1, theirs 2"):
        check_attach(msgspec.structs.replace(attach, version=2), 8192, b"\x20")
    with pytest.raises(ProtocolError, match="8192 bytes, ours have 4096"):
        check_attach(attach, 4096, b"\x20")
    with pytest.raises(ProtocolError, match="version 20, ours of 30"):
        check_attach(attach, 8192, b"\x30")
    with pytest.raises(ProtocolError):
        check_address(b"", b"\x20")
