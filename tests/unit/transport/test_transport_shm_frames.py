"""What is said on shared-memory connections; and that the format is the one that is written down."""

import itertools
import struct
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transport.doorbell_frames import MAX_BODY_BYTES, MAX_FRAME_BLOCKS, Attached, Refused, Taken, decode, encode
from kv_transport.shm_frames import (
    FIRST_FRAME_BLOCKS,
    FROM_RECEIVER,
    FROM_SENDER,
    Attach,
    Doorbell,
    check_doorbell,
    doorbells,
)
from pd_core.errors import ProtocolError
from pd_core.ticket import TicketRef
from pd_rpc.frames import FrameReader

REF = TicketRef("t-1", "boot", 7, 2)
BELL = Doorbell(4, REF, [3, 300], [17, 5], [2**64 - 1, 5])
RECORDED = bytes.fromhex(
    "4b56525000020000007827465938"
    "86a474797065a8646f6f7262656c6ca66e756d62657204a372656684a97469636b65745f6964a3742d31ab696e6361726e617469"
    "6f6ea4626f6f74a565706f636807a7617474656d707402a7696e64696365739203cd012ca9626c6f636b5f696473921105a76469"
    "676573747392cfffffffffffffffff05"
)
"""Of BELL; also in docs/wire-format.md."""

DOCUMENT = Path(__file__).parents[3] / "docs" / "wire-format.md"


def plain(frame: bytes) -> object:
    """A frame's body with nothing of ours."""
    magic, version, num_bytes, crc = struct.unpack(">4sHII", frame[:14])
    assert (magic, version, num_bytes, crc) == (b"KVRP", 2, len(frame) - 14, zlib.crc32(frame[14:]))
    return msgpack.unpackb(frame[14:])


def test_the_doorbell_in_the_documentation_is_what_is_sent():
    lines = DOCUMENT.read_text().partition("for places 3 and 300.\n\n")[2].splitlines()
    example = itertools.takewhile(lambda line: line.startswith("    "), lines)
    assert bytes.fromhex("".join(example)) == RECORDED
    assert encode(BELL) == RECORDED


def test_every_message_can_be_read_with_nothing_but_msgpack():
    assert plain(RECORDED) == {
        "type": "doorbell",
        "number": 4,
        "ref": {"ticket_id": "t-1", "incarnation": "boot", "epoch": 7, "attempt": 2},
        "indices": [3, 300],
        "block_ids": [17, 5],
        "digests": [2**64 - 1, 5],
    }
    nonce = bytes(range(16))
    attach = {"type": "attach", "version": 1, "num_blocks": 512, "block_bytes": 368640, "nonce": nonce}
    assert plain(encode(Attach(1, 512, 368640, nonce))) == attach
    assert plain(encode(Attached())) == {"type": "attached"}
    assert plain(encode(Taken(4))) == {"type": "taken", "number": 4}
    assert plain(encode(Refused("why"))) == {"type": "refused", "reason": "why"}


def test_messages_made_with_nothing_but_msgpack_are_understood():
    body = {"type": "taken", "number": 9, "later": None}
    assert decode(FROM_RECEIVER, msgpack.packb(body)) == Taken(9)
    assert decode(FROM_SENDER, RECORDED[14:]) == BELL


@pytest.mark.parametrize("message", [Attached(), Taken(1), Refused("no")])
def test_what_only_the_receiver_says_is_not_taken_from_a_sender(message):
    with pytest.raises(ProtocolError):
        decode(FROM_SENDER, encode(message)[14:])


@pytest.mark.parametrize(
    "bell",
    [
        Doorbell(1, REF, [0], [], [1]),
        Doorbell(1, REF, [0, 1], [0, 1], [1]),
        Doorbell(1, REF, [], [0], [0]),
    ],
)
def test_lists_that_contradict_each_other_are_refused(bell):
    with pytest.raises(ProtocolError, match="indices"):
        check_doorbell(bell)


@given(st.integers(1, 3000), st.integers(1, MAX_FRAME_BLOCKS), st.integers(1, 2**40))
def test_a_push_becomes_doorbells_that_name_every_block_once_and_fit(num_blocks, max_frame_blocks, first_number):
    indices, block_ids = list(range(num_blocks)), list(range(num_blocks, 0, -1))
    digests = [2**64 - 1 - index for index in indices]
    bells = list(doorbells(REF, indices, block_ids, digests, max_frame_blocks, first_number))
    assert [bell.number for bell in bells] == list(range(first_number, first_number + len(bells)))
    for field, whole in (("indices", indices), ("block_ids", block_ids), ("digests", digests)):
        assert list(itertools.chain.from_iterable(getattr(bell, field) for bell in bells)) == whole
    reader = FrameReader(MAX_BODY_BYTES)
    for bell in bells:
        assert 1 <= len(bell.indices) <= max_frame_blocks
        check_doorbell(bell)
        reader.feed(encode(bell))
        body = reader.next_body()
        assert body is not None
        assert decode(FROM_SENDER, body) == bell


@given(st.integers(1, 3000), st.integers(1, MAX_FRAME_BLOCKS))
def test_doorbells_with_digests_begin_small_and_grow_so_that_none_is_waited_for(num_blocks, max_frame_blocks):
    places = list(range(num_blocks))
    sizes = [len(bell.indices) for bell in doorbells(REF, places, places, places, max_frame_blocks, 1)]
    assert sizes[0] == min(FIRST_FRAME_BLOCKS, max_frame_blocks, num_blocks)
    assert all(size == min(2 * before, max_frame_blocks) for before, size in itertools.pairwise(sizes[:-1]))
    assert all(size <= min(2 * before, max_frame_blocks) for before, size in itertools.pairwise(sizes))


@given(st.integers(1, 3000), st.integers(1, MAX_FRAME_BLOCKS))
def test_doorbells_without_digests_are_as_few_as_can_be(num_blocks, max_frame_blocks):
    places = list(range(num_blocks))
    bells = list(doorbells(REF, places, places, [], max_frame_blocks, 1))
    assert len(bells) == -(-num_blocks // max_frame_blocks)
    assert all(bell.digests == [] for bell in bells)


@given(st.binary(max_size=300))
def test_no_bytes_make_anything_but_a_message_or_a_protocol_error(body):
    for decoder in (FROM_SENDER, FROM_RECEIVER):
        try:
            decode(decoder, body)
        except ProtocolError:
            continue
