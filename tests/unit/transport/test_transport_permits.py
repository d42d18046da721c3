"""The quarantine rule, without sockets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kv_transport.permits import PermitTable
from pd_core.errors import InvalidTransition, ProtocolError, StaleTicket
from pd_core.ticket import TicketRef


class NamedWriter:
    def __init__(self, name="writer"):
        self.name = name
        self.reasons = []

    def cut(self, reason):
        self.reasons.append(reason)


def ref(epoch=1, **changes):
    return TicketRef(**({"ticket_id": "t", "incarnation": "boot", "epoch": epoch, "attempt": 0} | changes))


@pytest.fixture
def table():
    table = PermitTable(num_blocks=8)
    table.open_permit(ref(), [5, 6, 7], needs_digests=False)
    return table


def test_a_frame_gets_the_slots_of_the_permit(table):
    frame = table.begin_frame(ref(), [2, 0], [], NamedWriter())
    assert frame.slots == [7, 5]


@pytest.mark.parametrize("changes", [{"ticket_id": "u"}, {"epoch": 0}, {"attempt": 1}])
def test_a_frame_that_differs_in_any_part_of_the_ref_is_stale(table, changes):
    with pytest.raises(StaleTicket):
        table.begin_frame(ref(**changes), [0], [], NamedWriter())


@pytest.mark.parametrize("changes", [{"incarnation": "old"}, {"incarnation": "old", "epoch": 0}, {"epoch": 2}])
def test_a_frame_of_another_boot_or_of_a_reservation_to_come_is_an_error(table, changes):
    with pytest.raises(ProtocolError, match="issued"):
        table.begin_frame(ref(**changes), [0], [], NamedWriter())
    assert table.num_permits == 1


def test_the_latest_epoch_is_known_after_its_permit_has_gone(table):
    table.open_permit(ref(5), [0], needs_digests=True)
    table.open_permit(ref(3), [1], needs_digests=True)
    for epoch in (1, 3, 5):
        table.revoke(ref(epoch), lambda: None)
    for epoch in range(6):
        with pytest.raises(StaleTicket):
            table.begin_frame(ref(epoch), [0], [1], NamedWriter())
    with pytest.raises(ProtocolError, match="issued"):
        table.begin_frame(ref(6), [0], [1], NamedWriter())


def test_a_frame_without_digests_comes_in_only_where_none_are_needed(table):
    table.open_permit(ref(2), [0, 1], needs_digests=True)
    with pytest.raises(ProtocolError, match="without digests"):
        table.begin_frame(ref(2), [0, 1], [], NamedWriter())
    for epoch in (1, 2):
        with pytest.raises(ProtocolError, match="2 blocks with 1 digests"):
            table.begin_frame(ref(epoch), [0, 1], [7], NamedWriter())
    assert table.begin_frame(ref(1), [0, 1], [], NamedWriter()).digests == []
    assert table.begin_frame(ref(2), [0, 1], [7, 8], NamedWriter()).digests == [7, 8]
    table.validate()


@pytest.mark.parametrize("indices", [[], [3], [-1], [0, 0], [2**64 - 1], [0, 1, 2, 3]])
def test_indices_that_the_range_does_not_have_are_refused_and_leave_nothing_behind(table, indices):
    with pytest.raises(ProtocolError):
        table.begin_frame(ref(), indices, [], NamedWriter())
    assert table.writers_inside(ref()) == []
    table.validate()
    assert table.begin_frame(ref(), [0, 1, 2], [], NamedWriter()).slots == [5, 6, 7]


@pytest.mark.parametrize("slots", [[0, 5], [8], [-1], [0, 0]])
def test_a_permit_for_slots_that_are_taken_doubled_or_outside_changes_nothing(table, slots):
    with pytest.raises(InvalidTransition):
        table.open_permit(ref(2), slots, needs_digests=False)
    assert table.num_permits == 1
    table.open_permit(ref(2), [0, 1], needs_digests=False)


def test_a_permit_cannot_be_opened_twice(table):
    with pytest.raises(InvalidTransition):
        table.open_permit(ref(), [0], needs_digests=False)


def test_revoking_a_permit_that_nobody_is_inside_frees_its_slots_at_once(table):
    left = []
    assert table.revoke(ref(), lambda: left.append(1)) == []
    assert left == [1]
    table.open_permit(ref(2), [5, 6, 7], needs_digests=False)


def test_slots_stay_taken_until_the_last_writer_is_out(table):
    left = []
    writers = [NamedWriter("a"), NamedWriter("b")]
    frames = [table.begin_frame(ref(), [index], [], writer) for index, writer in enumerate(writers)]
    assert {writer.name for writer in table.revoke(ref(), lambda: left.append(1))} == {"a", "b"}
    table.end_frame(frames[0], [])
    assert left == []
    with pytest.raises(InvalidTransition):
        table.open_permit(ref(2), [5], needs_digests=False)
    table.end_frame(frames[1], [])
    assert left == [1]
    table.open_permit(ref(2), [5, 6, 7], needs_digests=False)


def test_no_frame_begins_once_the_permit_is_revoked(table):
    table.begin_frame(ref(), [0], [], NamedWriter())
    table.revoke(ref(), lambda: None)
    with pytest.raises(StaleTicket):
        table.begin_frame(ref(), [1], [], NamedWriter())


def test_everybody_who_revokes_is_told_when_all_are_out(table):
    left = []
    frame = table.begin_frame(ref(), [0], [], NamedWriter())
    assert len(table.revoke(ref(), lambda: left.append("first"))) == 1
    assert len(table.revoke(ref(), lambda: left.append("second"))) == 1
    table.end_frame(frame, [])
    table.revoke(ref(), lambda: left.append("third"))
    assert left == ["first", "second", "third"]


def test_a_verified_block_is_never_written_again(table):
    table.end_frame(table.begin_frame(ref(), [0, 1], [], NamedWriter()), verified=[1])
    assert table.begin_frame(ref(), [0, 1, 2], [], NamedWriter()).slots == [5, None, 7]


def test_two_writers_are_never_inside_one_slot(table):
    first = table.begin_frame(ref(), [0, 1], [], NamedWriter())
    second = table.begin_frame(ref(), [1, 2], [], NamedWriter())
    assert second.slots == [None, 7]
    table.end_frame(second, [2])  # ends no claim of the first
    assert table.begin_frame(ref(), [0, 1, 2], [], NamedWriter()).slots == [None, None, None]
    table.end_frame(first, [])
    assert table.begin_frame(ref(), [0, 1], [], NamedWriter()).slots == [5, 6]


def test_a_frame_ends_once(table):
    frame = table.begin_frame(ref(), [0], [], NamedWriter())
    table.end_frame(frame, [0])
    with pytest.raises(InvalidTransition):
        table.end_frame(frame, [0])


class AnyOrder(RuleBasedStateMachine):
    """Permits and frames in any order; `owners` is the model: which epoch may still be written in each slot."""

    permits = Bundle("permits")
    frames = Bundle("frames")

    def __init__(self):
        super().__init__()
        self.table = PermitTable(num_blocks=6)
        self.epoch = 0
        self.slots = {}
        self.inside = {}
        self.revoked = set()
        self.left = set()

    @rule(target=permits, slots=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    def open(self, slots):
        self.epoch += 1
        taken = {slot for epoch in self.slots for slot in self.slots[epoch] if epoch not in self.left}
        if taken & set(slots):
            with pytest.raises(InvalidTransition):
                self.table.open_permit(ref(self.epoch), slots, needs_digests=False)
            return multiple()
        self.table.open_permit(ref(self.epoch), slots, needs_digests=False)
        self.slots[self.epoch] = slots
        self.inside[self.epoch] = []
        return self.epoch

    @rule(target=frames, epoch=permits, data=st.data())
    def begin(self, epoch, data):
        num_slots = len(self.slots[epoch])
        indices = data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, unique=True))
        if epoch in self.revoked:
            with pytest.raises(StaleTicket):
                self.table.begin_frame(ref(epoch), indices, [], NamedWriter())
            return multiple()
        frame = self.table.begin_frame(ref(epoch), indices, [], NamedWriter())
        written = {slot for frame in self.inside[epoch] for slot in frame.slots}
        assert not written & {slot for slot in frame.slots if slot is not None}
        assert all(slot in (None, self.slots[epoch][i]) for i, slot in zip(indices, frame.slots, strict=True))
        self.inside[epoch].append(frame)
        return frame

    @rule(frame=consumes(frames), data=st.data())
    def end(self, frame, data):
        written = [i for i, slot in zip(frame.indices, frame.slots, strict=True) if slot is not None]
        self.inside[frame.ref.epoch].remove(frame)
        self.table.end_frame(frame, data.draw(st.sets(st.sampled_from(written))) if written else [])

    @rule(epoch=permits)
    def revoke(self, epoch):
        self.revoked.add(epoch)
        writers = self.table.revoke(ref(epoch), lambda: self.left.add(epoch))
        assert len(writers) == len(self.inside[epoch])

    @invariant()
    def a_permit_is_left_exactly_when_it_is_revoked_and_empty(self):
        self.table.validate()
        assert self.left == {epoch for epoch in self.revoked if not self.inside[epoch]}
        assert self.table.num_permits == len(self.slots) - len(self.left)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
