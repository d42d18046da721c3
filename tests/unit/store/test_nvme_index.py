"""Slots and their blocks: no order of events loses a slot or leaves a child without its parent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_store.nvme_index import Entry, Fate, SlotIndex, SlotState
from kv_store.slot_format import BadBytes, SlotHeader
from pd_core.errors import InvalidTransition

ROOT = b"root"


def header(name: str, parent: str = "", position: int = 0, sequence: int = 0) -> SlotHeader:
    return SlotHeader(name.encode(), parent.encode() or ROOT, position, 1, 4000, sequence)


def live(index: SlotIndex, *blocks: SlotHeader) -> list[Entry]:
    entries = [index.take_slot(block) for block in blocks]
    for entry in entries:
        index.written(entry)
    return entries


A, B, C = header("a"), header("b", "a", 1), header("c", "b", 2)


def test_a_child_that_is_written_before_its_parent_is_live_with_it() -> None:
    index = SlotIndex(3)
    a, b, c = (index.take_slot(block) for block in (A, B, C))
    assert index.written(c) == [] and index.written(b) == []
    assert index.find(b"c") is None and index.begin_read(b"b") is None
    assert [block.name for block in index.written(a)] == [b"a", b"b", b"c"]
    index.validate()


def test_when_a_write_fails_what_continues_it_goes_too_wherever_it_is() -> None:
    index = SlotIndex(3)
    a, b, c = (index.take_slot(block) for block in (A, B, C))
    index.written(b)
    index.failed(a)
    assert (a.state, b.state, c.state) == (SlotState.WIPING, SlotState.WIPING, SlotState.WRITING)
    assert index.written(c) == [] and c.state is SlotState.WIPING
    index.validate()
    for entry in index.begin_wipe(10):
        index.wiped(entry)
    assert index.num_free == 3


def test_a_block_may_be_written_again_while_its_first_write_is_still_on_its_way_out() -> None:
    index = SlotIndex(2)
    first = index.take_slot(A)
    index.drop(b"a")
    second = index.take_slot(A)
    index.written(second)
    index.written(first)
    assert index.find(b"a") is second
    index.validate()


def test_dropping_returns_children_before_parents() -> None:
    index = SlotIndex(4)
    live(index, A, B, C, header("d", "a", 1))
    dropped = index.drop(b"a")
    assert sorted(dropped) == [b"a", b"b", b"c", b"d"]
    assert dropped.index(b"c") < dropped.index(b"b") < dropped.index(b"a") > dropped.index(b"d")


def test_a_slot_that_is_read_is_neither_evicted_nor_wiped() -> None:
    index = SlotIndex(1)
    live(index, A)
    entry = index.begin_read(b"a")
    assert entry is not None and not index.is_evictable(b"a", header("x"))
    index.drop(b"a")
    assert index.begin_wipe(10) == []
    index.end_read(entry)
    assert index.begin_wipe(10) == [entry]
    index.wiped(entry)
    assert index.num_free == 1 and index.has_gone(entry)


def test_a_block_is_not_evicted_for_the_one_that_continues_it() -> None:
    index = SlotIndex(1)
    live(index, A)
    assert not index.is_evictable(b"a", B)
    with pytest.raises(InvalidTransition, match="cannot be evicted"):
        index.replace(b"a", B)
    assert index.replace(b"a", header("x")).slot == 0


def test_a_parent_is_not_evicted_while_a_child_is_on_its_way() -> None:
    index = SlotIndex(2)
    live(index, A)
    index.take_slot(B)
    assert not index.is_evictable(b"a", header("x"))


def test_events_that_make_no_sense_change_nothing() -> None:
    index = SlotIndex(1)
    (entry,) = live(index, A)
    for call in (
        lambda: index.written(entry),
        lambda: index.failed(entry),
        lambda: index.end_read(entry),
        lambda: index.wiped(entry),
        lambda: index.take_slot(A),
        lambda: index.take_slot(C),
        lambda: index.take_slot(header("x")),
        lambda: index.grow(0),
    ):
        with pytest.raises(InvalidTransition):
            call()
    index.validate()
    assert index.counts().live == 1


def test_rebuilding_keeps_what_has_its_parents_and_the_newer_of_two_copies() -> None:
    found = [
        (0, header("b", "a", 1, sequence=2)),
        (1, header("a", sequence=1)),
        (2, BadBytes("?")),
        (3, header("y", "x", 1, sequence=3)),
        (4, header("z", "y", 2, sequence=4)),
        (5, header("b", "a", 1, sequence=5)),
        (7, header("late", "b", 3, sequence=6)),
    ]
    rebuilt = SlotIndex.rebuild(8, found)
    rebuilt.index.validate()
    assert [block.name for block in rebuilt.live] == [b"a", b"b"]
    entry = rebuilt.index.find(b"b")
    assert entry is not None and entry.slot == 5
    assert (rebuilt.num_corrupt, rebuilt.num_orphans, rebuilt.num_doubles) == (1, 3, 1)
    assert rebuilt.index.counts().wiping == 5 and rebuilt.index.num_free == 1
    assert rebuilt.index.take_slot(header("new")).header.sequence == 7


names = st.sampled_from("abcdefgh")


@given(
    st.lists(st.tuples(st.integers(0, 9), names, names, st.integers(0, 3), st.integers(0, 9)), unique_by=lambda t: t[0])
)
def test_any_headers_at_all_make_a_sound_index(rows: list[tuple[int, str, str, int, int]]) -> None:
    rebuilt = SlotIndex.rebuild(10, [(slot, header(n, p, pos, seq)) for slot, n, p, pos, seq in rows])
    rebuilt.index.validate()
    counts = rebuilt.index.counts()
    assert counts.live + counts.wiping + counts.free == 10
    assert counts.live == len(rebuilt.live)


class AnyOrder(RuleBasedStateMachine):
    """Everything that can happen to an index, in any order."""

    @initialize(num_slots=st.integers(0, 6))
    def make(self, num_slots: int) -> None:
        self.index = SlotIndex(num_slots)
        self.writing: list[Entry] = []
        self.reading: list[Entry] = []
        self.wiping: list[Entry] = []
        self.known: set[bytes] = set()  # what a policy would know

    @rule(name=names, parent=names, position=st.integers(0, 3), victim=names)
    def write(self, name: str, parent: str, position: int, victim: str) -> None:
        block = header(name, parent if position else "", position)
        if self.index.fate(block.name, block.parent, block.position) is not Fate.NEEDS_SLOT:
            return
        if self.index.num_free:
            self.writing.append(self.index.take_slot(block))
        elif self.index.is_evictable(victim.encode(), block):
            self.writing.append(self.index.replace(victim.encode(), block))
            self.known.remove(victim.encode())

    @rule(at=st.integers(0, 20), fails=st.booleans())
    def end_write(self, at: int, fails: bool) -> None:
        if self.writing:
            entry = self.writing.pop(at % len(self.writing))
            if fails:
                self.index.failed(entry)
                return
            for block in self.index.written(entry):
                assert block.position == 0 or block.parent in self.known
                self.known.add(block.name)

    @rule(name=names)
    def begin_read(self, name: str) -> None:
        entry = self.index.begin_read(name.encode())
        assert (entry is not None) == (name.encode() in self.known)
        if entry is not None:
            self.reading.append(entry)

    @rule(at=st.integers(0, 20))
    def end_read(self, at: int) -> None:
        if self.reading:
            self.index.end_read(self.reading.pop(at % len(self.reading)))

    @rule(name=names)
    def drop(self, name: str) -> None:
        for gone in self.index.drop(name.encode()):
            self.known.remove(gone)

    @rule(most=st.integers(0, 3))
    def begin_wipe(self, most: int) -> None:
        self.wiping.extend(self.index.begin_wipe(most))

    @rule(fails=st.booleans())
    def end_wipe(self, fails: bool) -> None:
        if self.wiping:
            entry = self.wiping.pop()
            self.index.wipe_failed(entry) if fails else self.index.wiped(entry)

    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        self.index.grow(self.index.num_slots + more)

    @invariant()
    def is_sound(self) -> None:
        self.index.validate()
        assert {block.name for block in self.index.live()} == self.known
        slots = [entry.slot for entry in (*self.writing, *self.wiping)] + [entry.slot for entry in set(self.reading)]
        assert len(set(slots)) == len(slots)  # nobody is in a slot of another

    def teardown(self) -> None:
        """When all that is under way has ended and been wiped, every slot is free or live."""
        while self.writing:
            self.end_write(0, fails=False)
        while self.reading:
            self.end_read(0)
        while self.wiping:
            self.end_wipe(fails=False)
        self.wiping = self.index.begin_wipe(1000)
        while self.wiping:
            self.end_wipe(fails=False)
        counts = self.index.counts()
        assert counts.live + counts.free == counts.total


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
