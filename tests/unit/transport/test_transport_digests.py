"""Digests that are made as late as they are sent, and only once."""

import pytest

from kv_transport.digest import BlockDigests, block_digest
from kv_transport.shm_frames import FIRST_FRAME_BLOCKS, doorbells
from pd_core.ticket import TicketRef

BLOCKS = [memoryview(bytes([number]) * 100) for number in range(40)]
KEYS = [100 + number for number in range(40)]


@pytest.fixture
def made(monkeypatch):
    """Blocks that were read for a digest, by their first byte."""
    read: list[int] = []

    def digest(block):
        read.append(block[0])
        return block_digest(block)

    monkeypatch.setattr("kv_transport.digest.block_digest", digest)
    return read


def test_a_digest_is_made_when_it_is_asked_for_and_then_known(made):
    known: dict[int, int] = {}
    digests = BlockDigests(BLOCKS, KEYS, known)
    assert len(digests) == 40
    assert made == []
    assert digests[3] == block_digest(BLOCKS[3])
    assert digests[3] == digests[3:4][0]
    assert made == [3]
    assert known == {103: block_digest(BLOCKS[3])}
    assert list(digests) == [block_digest(block) for block in BLOCKS]
    assert sorted(made) == list(range(40))


def test_what_is_known_stays_whatever_became_of_the_block(made):
    block = bytearray(b"as it was finished")
    known = {7: block_digest(memoryview(block))}
    before = dict(known)
    block[:] = b"and changed since."
    assert list(BlockDigests([memoryview(block)], [7], known)) == list(before.values())
    assert (made, known) == ([], before)


def test_a_piece_makes_none_and_knows_what_the_whole_knows(made):
    digests = BlockDigests(BLOCKS, KEYS)
    piece = digests[10:20][2:4]
    assert (len(piece), made) == (2, [])
    assert list(piece) == [block_digest(block) for block in BLOCKS[12:14]]
    assert digests[13] == piece[1]
    assert made == [12, 13]
    assert not digests[5:5]


def test_the_first_doorbell_needs_no_digest_of_the_blocks_after_it(made):
    bells = doorbells(TicketRef("t-1", "boot", 7, 2), range(40), range(40), BlockDigests(BLOCKS, KEYS), 128, 1)
    first = next(bells)
    assert made == list(range(FIRST_FRAME_BLOCKS))
    assert first.digests == [block_digest(block) for block in BLOCKS[:FIRST_FRAME_BLOCKS]]
    assert sum(len(bell.indices) for bell in bells) == 40 - FIRST_FRAME_BLOCKS
    assert made == list(range(40))
