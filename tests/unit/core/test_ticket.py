"""The ticket's machine: any order of events ends with the blocks either the request's or free, never both."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_core.errors import (
    Cancelled,
    DigestMismatch,
    InvalidTransition,
    KvrelayError,
    LeaseExpired,
    StaleTicket,
)
from pd_core.ledger import BlockLedger
from pd_core.request import FinishReason
from pd_core.ticket import (
    BlockCorrupt,
    BlockVerified,
    CountCorrupt,
    FirstToken,
    FreeBlocks,
    GivenUp,
    JoinBatch,
    LeaseRenewed,
    PrefillFinished,
    Revoke,
    Seal,
    TicketCommand,
    TicketEvent,
    TicketLife,
    TicketRef,
    TicketState,
    TimePassed,
    WritersGone,
    issue,
    step,
)

REF = TicketRef("t1", "boot", 1, 1)
FIRST = FirstToken(token=7, index=0)
LEASE_S = 3.0
NUM_BLOCKS = 3


def verified(*indices: int, now_s: float = 0.0, ref: TicketRef = REF) -> list[TicketEvent]:
    return [BlockVerified(ref, index, now_s) for index in indices]


def finished(now_s: float = 0.0, first: FirstToken = FIRST) -> PrefillFinished:
    return PrefillFinished(REF, first, now_s)


def run(*events: TicketEvent, num_blocks: int = NUM_BLOCKS) -> tuple[TicketLife, list[TicketCommand]]:
    """Feeds the events to a fresh ticket; the end and all commands."""
    life, done = issue(REF, num_blocks, LEASE_S, 0.0), []
    for event in events:
        life, commands = step(life, event)
        life.validate()
        done += commands
    return life, done


def test_a_handoff_without_trouble_joins_the_batch_once() -> None:
    life, commands = run(*verified(0, 1, 2), finished(), WritersGone())
    assert commands == [Seal(), JoinBatch(FIRST)]
    assert life.state is TicketState.COMMITTED
    assert life.is_over


@pytest.mark.parametrize("order", list(itertools.permutations([*verified(0, 1, 2), finished()])))
def test_blocks_and_the_end_of_the_prefill_may_come_in_any_order(order: tuple[TicketEvent, ...]) -> None:
    life, commands = run(*order)
    assert commands == [Seal()]
    assert life.state is TicketState.SEALING


def test_nothing_is_committed_while_a_writer_may_be_inside_the_blocks() -> None:
    life, commands = run(*verified(0, 1, 2), finished(), LeaseRenewed(REF, 1.0), finished(), TimePassed(99.0))
    assert life.state is TicketState.SEALING
    assert JoinBatch(FIRST) not in commands


def test_a_late_copy_that_comes_wrong_while_sealing_spoils_the_handoff() -> None:
    life, commands = run(*verified(0, 1, 2), finished(), BlockCorrupt(REF, 1, 0.0))
    assert commands[:2] == [Seal(), CountCorrupt(1)]
    assert isinstance(commands[2], Revoke)
    assert isinstance(commands[2].error, DigestMismatch)
    life, commands = step(life, WritersGone())
    assert commands == [FreeBlocks()]


def test_a_right_copy_of_a_block_changes_nothing() -> None:
    once, _ = run(*verified(0, 1))
    twice, _ = run(*verified(0, 1, 1, 0))
    assert once == twice
    sealing, _ = run(*verified(0, 1, 2), finished())
    assert step(sealing, BlockVerified(REF, 0, 9.0)) == (sealing, [])


def test_a_second_copy_that_comes_wrong_empties_the_slot_again() -> None:
    life, commands = run(*verified(0, 1, 2), BlockCorrupt(REF, 1, 0.0), finished())
    assert commands == [CountCorrupt(1)]
    assert life.missing == [1]
    life, commands = step(life, BlockVerified(REF, 1, 0.0))
    assert commands == [Seal()]


def test_a_block_that_never_came_right_is_missing() -> None:
    life, _ = run(BlockCorrupt(REF, 0, 0.0), *verified(2))
    assert life.missing == [0, 1]
    only_wrong, _ = run(BlockCorrupt(REF, 0, 0.0))
    assert only_wrong.state is TicketState.RESERVED


def test_a_silent_writer_loses_the_lease_and_a_heard_one_keeps_it() -> None:
    heard: list[TicketEvent] = [LeaseRenewed(REF, 2.0), *verified(0, now_s=4.0), finished(now_s=6.0)]
    life, commands = run(TimePassed(2.9), *heard, TimePassed(8.9))
    assert commands == []
    life, commands = step(life, TimePassed(9.0))
    assert isinstance(commands[0], Revoke)
    assert isinstance(commands[0].error, LeaseExpired)
    assert life.state is TicketState.ABORTED


def test_a_clock_reading_that_comes_late_does_not_shorten_the_lease() -> None:
    life, _ = run(LeaseRenewed(REF, 5.0), LeaseRenewed(REF, 1.0))
    assert life.silent_after_s == 5.0 + LEASE_S


def test_a_writer_that_never_comes_is_silent_too() -> None:
    _, commands = run(TimePassed(LEASE_S))
    assert isinstance(commands[0], Revoke)


@pytest.mark.parametrize("before", [[], verified(0), [*verified(0, 1, 2), finished()]])
def test_giving_up_at_any_open_moment_frees_the_blocks_when_the_writers_are_gone(before: list[TicketEvent]) -> None:
    error = Cancelled("the client left")
    life, commands = run(*before, GivenUp(error), GivenUp(Cancelled("and again")), TimePassed(99.0))
    assert [command for command in commands if isinstance(command, Revoke)] == [Revoke(error)]
    assert not life.is_over
    life, commands = step(life, WritersGone())
    assert commands == [FreeBlocks()]
    assert life.state is TicketState.RELEASED


@pytest.mark.parametrize(
    "late", [BlockVerified(REF, 0, 0.0), BlockCorrupt(REF, 0, 0.0), LeaseRenewed(REF, 0.0), finished()]
)
def test_a_late_writer_is_told_that_its_ticket_is_stale(late: TicketEvent) -> None:
    aborted, _ = run(GivenUp(Cancelled("left")))
    released, _ = step(aborted, WritersGone())
    for life in (aborted, released):
        with pytest.raises(StaleTicket):
            step(life, late)


def test_two_different_first_tokens_are_refused_in_every_state() -> None:
    other = finished(first=FirstToken(token=8, index=0))
    filling, _ = run(finished())
    sealing, _ = run(*verified(0, 1, 2), finished())
    committed, _ = step(sealing, WritersGone())
    for life in (filling, sealing, committed):
        with pytest.raises(StaleTicket, match="two first tokens"):
            step(life, other)


def test_a_ticket_for_no_blocks_is_sealed_by_the_first_token_alone() -> None:
    life, commands = run(finished(), num_blocks=0)
    assert commands == [Seal()]
    assert life.state is TicketState.SEALING


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": TicketState.COMMITTED, "first_token": FIRST},
        {"state": TicketState.SEALING, "arrived": 0b111},
        {"state": TicketState.FILLING, "arrived": 0b111, "first_token": FIRST},
        {"state": TicketState.RESERVED, "arrived": 0b1},
        {"state": TicketState.FILLING, "arrived": 0b1111},
    ],
)
def test_validate_sees_fields_that_contradict_each_other(wrong: dict[str, object]) -> None:
    life = msgspec.structs.replace(issue(REF, NUM_BLOCKS, LEASE_S, 0.0), **wrong)
    with pytest.raises(InvalidTransition):
        life.validate()


OTHER_REFS = [
    msgspec.structs.replace(REF, **change)
    for change in ({"ticket_id": "t2"}, {"incarnation": "reboot"}, {"epoch": 2}, {"attempt": 2})
]
TIMES = st.floats(0.0, 12.0, allow_nan=False)
REFS = st.sampled_from([REF] * 12 + OTHER_REFS)
INDICES = st.integers(-1, NUM_BLOCKS)
FIRSTS = st.sampled_from([FIRST] * 6 + [FirstToken(8, 0), FirstToken(7, 0, FinishReason.STOP)])
EVENTS: st.SearchStrategy[TicketEvent] = st.one_of(
    st.builds(BlockVerified, REFS, st.integers(0, NUM_BLOCKS - 1), TIMES),
    st.builds(BlockVerified, REFS, INDICES, TIMES),
    st.builds(BlockCorrupt, REFS, INDICES, TIMES),
    st.builds(LeaseRenewed, REFS, TIMES),
    st.builds(PrefillFinished, REFS, FIRSTS, TIMES),
    st.builds(TimePassed, TIMES),
    st.builds(GivenUp, st.sampled_from([Cancelled("left"), KvrelayError("failed")])),
    st.just(WritersGone()),
)


class _Pool:
    """A ledger that does what the machine commands, as a decode worker does."""

    def __init__(self) -> None:
        self.ledger = BlockLedger(NUM_BLOCKS + 2, "boot")
        reservation = self.ledger.try_reserve(NUM_BLOCKS)
        assert reservation is not None
        self.epoch = reservation.epoch
        self.is_asked_to_close = False

    def carry_out(self, commands: list[TicketCommand]) -> None:
        for command in commands:
            match command:
                case Seal():
                    self.is_asked_to_close = True
                case JoinBatch():
                    self.ledger.commit(self.epoch, "request")
                case Revoke():
                    self.ledger.abort(self.epoch)
                    self.is_asked_to_close = True
                case FreeBlocks():
                    self.ledger.end_quarantine(self.epoch)
                case CountCorrupt():
                    pass
        self.ledger.validate()


@settings(max_examples=2000, deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_any_order_of_events_leaks_no_block_and_can_be_brought_to_an_end(events: list[TicketEvent]) -> None:
    pool, life, now_s = _Pool(), issue(REF, NUM_BLOCKS, LEASE_S, 0.0), 0.0
    for event in events:
        if isinstance(event, WritersGone) and not pool.is_asked_to_close:
            continue  # the transport vouches for nothing unasked; the illegal case has a test of its own
        try:
            after, commands = step(life, event)
        except (InvalidTransition, StaleTicket):
            continue
        _is_a_way_of_the_table(life, after)
        after.validate()
        pool.carry_out(commands)
        life, now_s = after, max(now_s, getattr(event, "now_s", 0.0))
        counts = pool.ledger.counts()
        assert (counts.reserved > 0) == life.is_open
        assert (counts.quarantined > 0) == (life.state is TicketState.ABORTED)
        assert (counts.held > 0) == (life.state is TicketState.COMMITTED)
    # Silence alone takes an open ticket to its end, and the transport's word does the rest.
    life, commands = step(life, TimePassed(now_s + LEASE_S))
    pool.carry_out(commands)
    if not life.is_over:
        life, commands = step(life, WritersGone())
        pool.carry_out(commands)
    assert life.is_over
    if life.state is TicketState.COMMITTED:
        pool.ledger.release("request")
    assert pool.ledger.counts().is_idle


_WAYS = {
    TicketState.RESERVED: {TicketState.RESERVED, TicketState.FILLING, TicketState.SEALING, TicketState.ABORTED},
    TicketState.FILLING: {TicketState.RESERVED, TicketState.FILLING, TicketState.SEALING, TicketState.ABORTED},
    TicketState.SEALING: {TicketState.SEALING, TicketState.COMMITTED, TicketState.ABORTED},
    TicketState.COMMITTED: {TicketState.COMMITTED},
    TicketState.ABORTED: {TicketState.ABORTED, TicketState.RELEASED},
    TicketState.RELEASED: {TicketState.RELEASED},
}


def _is_a_way_of_the_table(before: TicketLife, after: TicketLife) -> None:
    assert after.state in _WAYS[before.state], f"{before.story()} -> {after.story()}"


def _lives() -> list[TicketLife]:
    """A ticket in each state."""
    filling, _ = run(*verified(0))
    sealing, _ = run(*verified(0, 1, 2), finished())
    committed, _ = step(sealing, WritersGone())
    aborted, _ = run(GivenUp(Cancelled("left")))
    released, _ = step(aborted, WritersGone())
    return [issue(REF, NUM_BLOCKS, LEASE_S, 0.0), filling, sealing, committed, aborted, released]


def _events() -> list[TicketEvent]:
    return [
        *verified(0),
        *verified(NUM_BLOCKS),
        *verified(0, ref=OTHER_REFS[0]),
        BlockCorrupt(REF, 0, 0.0),
        BlockCorrupt(REF, -1, 0.0),
        LeaseRenewed(REF, 0.0),
        LeaseRenewed(OTHER_REFS[1], 0.0),
        finished(),
        PrefillFinished(OTHER_REFS[2], FIRST, 0.0),
        TimePassed(0.0),
        GivenUp(Cancelled("left")),
        WritersGone(),
    ]


LEGAL = {  # for each state, the places in _events() that its table has
    TicketState.RESERVED: {0, 3, 5, 7, 9, 10},
    TicketState.FILLING: {0, 3, 5, 7, 9, 10},
    TicketState.SEALING: {0, 3, 5, 7, 9, 10, 11},
    TicketState.COMMITTED: {5, 7, 9},
    TicketState.ABORTED: {9, 10, 11},
    TicketState.RELEASED: {9, 10},
}


@pytest.mark.parametrize("life", _lives(), ids=lambda life: life.state.value)
@pytest.mark.parametrize("place", range(len(_events())))
def test_exactly_the_events_of_the_table_are_taken(life: TicketLife, place: int) -> None:
    before = msgspec.structs.replace(life)
    event = _events()[place]
    if place in LEGAL[life.state]:
        step(life, event)[0].validate()
    else:
        with pytest.raises((InvalidTransition, StaleTicket)):
            step(life, event)
    assert life == before
