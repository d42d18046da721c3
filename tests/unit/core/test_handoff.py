"""The handoff's machine: whatever happens, our blocks are released exactly once, and only when nothing reads them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_core.errors import Cancelled, InvalidTransition, TransferError
from pd_core.handoff import (
    MAX_ROUNDS,
    Abandon,
    AskVerdict,
    BlocksMissing,
    BlocksReady,
    HandoffCommand,
    HandoffEvent,
    HandoffGivenUp,
    HandoffLife,
    HandoffState,
    PromptComputed,
    Push,
    PushEnded,
    ReceiverCommitted,
    ReleaseBlocks,
    SayAllSent,
    StopPushes,
    step,
)
from pd_core.ticket import FirstToken

FIRST = FirstToken(token=7, index=0)
NUM_BLOCKS = 4
LEFT = HandoffGivenUp(Cancelled("the client left"))


def run(*events: HandoffEvent, num_blocks: int = NUM_BLOCKS) -> tuple[HandoffLife, list[HandoffCommand]]:
    """Feeds the events to a fresh handoff; the end and all commands."""
    life, done = HandoffLife(num_blocks), []
    for event in events:
        life, commands = step(life, event)
        life.validate()
        done += commands
    return life, done


ALL_PUSHED: list[HandoffEvent] = [BlocksReady([0, 1]), BlocksReady([2, 3]), PushEnded(), PromptComputed(FIRST)]


def test_a_handoff_without_trouble_pushes_asks_and_releases() -> None:
    life, commands = run(*ALL_PUSHED, PushEnded(), ReceiverCommitted())
    assert commands == [Push([0, 1]), Push([2, 3]), AskVerdict(FIRST), SayAllSent(), ReleaseBlocks()]
    assert life.is_over


def test_the_receiver_is_asked_as_soon_as_the_prompt_is_done_while_the_last_push_is_under_way() -> None:
    life, commands = run(*ALL_PUSHED)
    assert commands[-1] == AskVerdict(FIRST)
    assert (life.state, life.num_pushes) == (HandoffState.FINISHING, 1)
    still_computing, commands = run(BlocksReady([0, 1]), PushEnded())
    assert commands == [Push([0, 1])]
    assert still_computing.state is HandoffState.PUSHING


def test_the_receiver_is_told_that_all_is_sent_when_the_last_push_has_ended_and_not_before() -> None:
    life, commands = run(BlocksReady([0]), BlocksReady([1]), PushEnded(), BlocksReady([2, 3]), PromptComputed(FIRST))
    assert SayAllSent() not in commands
    life, commands = step(life, PushEnded())
    assert commands == []
    _, commands = step(life, PushEnded())
    assert commands == [SayAllSent()]


def test_a_receiver_that_has_all_before_the_push_says_so_waits_for_nothing_but_our_blocks_do() -> None:
    life, commands = run(*ALL_PUSHED, ReceiverCommitted())
    assert ReleaseBlocks() not in commands
    assert life.state is HandoffState.COMMITTED
    life, commands = step(life, PushEnded())
    assert commands == [ReleaseBlocks()]
    assert life.is_over


def test_a_push_that_is_under_way_when_nobody_wants_it_any_more_is_stopped_though_the_handoff_has_succeeded() -> None:
    life, _ = run(*ALL_PUSHED, ReceiverCommitted())
    assert step(life, LEFT) == (life, [StopPushes()])
    assert step(life, PushEnded())[1] == [ReleaseBlocks()]


def test_a_verdict_of_missing_blocks_before_the_pushes_ended_ends_the_handoff() -> None:
    life, commands = run(*ALL_PUSHED, BlocksMissing([3]))
    assert isinstance(commands[-1], Abandon)
    assert "on their way" in commands[-1].error.message
    _, commands = step(life, PushEnded())
    assert commands == [ReleaseBlocks()]


def test_sent_is_not_enough_to_release() -> None:
    _, commands = run(*ALL_PUSHED, PushEnded())
    assert ReleaseBlocks() not in commands


def test_missing_blocks_are_sent_again_and_asked_for_again() -> None:
    life, commands = run(*ALL_PUSHED, PushEnded(), BlocksMissing([1, 3]))
    assert commands[-2:] == [Push([1, 3]), AskVerdict(FIRST)]
    life, commands = step(life, PushEnded())
    assert commands == [SayAllSent()]
    _, commands = step(life, ReceiverCommitted())
    assert commands == [ReleaseBlocks()]


def test_blocks_that_never_arrive_are_given_up_after_so_many_rounds() -> None:
    again: list[HandoffEvent] = [BlocksMissing([0]), PushEnded()]
    life, _ = run(*ALL_PUSHED, PushEnded(), *again * MAX_ROUNDS)
    life, commands = step(life, BlocksMissing([0]))
    assert isinstance(commands[1], Abandon)
    assert isinstance(commands[1].error, TransferError)
    assert commands == [StopPushes(), commands[1], ReleaseBlocks()]


@pytest.mark.parametrize("indices", [[], [NUM_BLOCKS], [-1], [0, 99]])
def test_a_verdict_that_cannot_be_meant_ends_the_handoff(indices: list[int]) -> None:
    life, commands = run(*ALL_PUSHED, PushEnded(), BlocksMissing(indices))
    assert isinstance(commands[-2], Abandon)
    assert commands[-1] == ReleaseBlocks()
    assert life.is_over


def test_blocks_are_not_released_while_a_push_reads_them() -> None:
    life, commands = run(BlocksReady([0]), BlocksReady([1]), LEFT)
    assert commands[-2:] == [StopPushes(), Abandon(LEFT.error)]
    life, commands = step(life, PushEnded())
    assert commands == []
    life, commands = step(life, PushEnded())
    assert commands == [ReleaseBlocks()]
    assert life.is_over


def test_what_was_under_way_when_we_gave_up_is_ignored() -> None:
    life, _ = run(BlocksReady([0]), LEFT)
    for event in (BlocksReady([1]), PromptComputed(FIRST), BlocksMissing([0]), ReceiverCommitted(), LEFT):
        assert step(life, event) == (life, [])


def test_giving_up_twice_stops_once() -> None:
    _, commands = run(LEFT, LEFT)
    assert commands == [StopPushes(), Abandon(LEFT.error), ReleaseBlocks()]


def test_a_handoff_that_has_nothing_to_ship_asks_at_once() -> None:
    _, commands = run(PromptComputed(FIRST), num_blocks=0)
    assert commands == [AskVerdict(FIRST), SayAllSent()]


@pytest.mark.parametrize("indices", [[], [1], [0, 2], [1, 0], [0, 0], [0, 1, 2, 3, 4]])
def test_blocks_are_ready_in_the_order_of_the_range_only(indices: list[int]) -> None:
    life = HandoffLife(NUM_BLOCKS)
    with pytest.raises(InvalidTransition):
        step(life, BlocksReady(indices))


def test_the_prompt_cannot_end_before_its_blocks_are_ready() -> None:
    life, _ = run(BlocksReady([0, 1, 2]))
    with pytest.raises(InvalidTransition):
        step(life, PromptComputed(FIRST))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_pushes": -1},
        {"state": HandoffState.RELEASED, "num_pushes": 1},
        {"state": HandoffState.COMMITTED, "num_ready": 4, "first_token": FIRST},
        {"state": HandoffState.COMMITTED, "num_ready": 3, "num_pushes": 1, "first_token": FIRST},
        {"state": HandoffState.FINISHING, "num_ready": 3, "first_token": FIRST},
        {"state": HandoffState.FINISHING, "num_ready": 4},
        {"state": HandoffState.PUSHING, "num_ready": 4, "first_token": FIRST},
    ],
)
def test_validate_sees_fields_that_contradict_each_other(wrong: dict[str, object]) -> None:
    life = msgspec.structs.replace(HandoffLife(NUM_BLOCKS), **wrong)
    with pytest.raises(InvalidTransition):
        life.validate()


INDICES = st.lists(st.integers(-1, NUM_BLOCKS), max_size=NUM_BLOCKS)
ANY_EVENT: st.SearchStrategy[HandoffEvent] = st.one_of(
    st.builds(BlocksReady, INDICES),
    st.just(PushEnded()),
    st.just(PromptComputed(FIRST)),
    st.builds(BlocksMissing, INDICES),
    st.just(ReceiverCommitted()),
    st.just(LEFT),
)


class _Sender:
    """Counts what reads our blocks, and what the receiver was told, as the commands and events say."""

    def __init__(self) -> None:
        self.num_reading = 0
        self.num_released = 0
        self.is_asked = False
        self.is_all_sent = False

    def carry_out(self, commands: list[HandoffCommand]) -> None:
        for command in commands:
            assert not self.num_released, "nothing may be done with blocks that are released"
            match command:
                case Push():
                    self.num_reading += 1
                case AskVerdict():
                    assert not self.is_asked, "one verdict at a time"
                    self.is_asked, self.is_all_sent = True, False
                case SayAllSent():
                    assert self.num_reading == 0
                    assert self.is_asked
                    assert not self.is_all_sent, "said once for each question"
                    self.is_all_sent = True
                case ReleaseBlocks():
                    assert self.num_reading == 0
                    self.num_released += 1
                case StopPushes() | Abandon():
                    pass


# Every second event is the next one or two blocks, so that the later states are met often.
NEXT_BLOCKS = st.integers(1, 2)


@settings(max_examples=2000, deadline=None)
@given(st.lists(NEXT_BLOCKS | ANY_EVENT, max_size=30))
def test_any_order_of_events_releases_the_blocks_exactly_once(plan: list[HandoffEvent | int]) -> None:
    life, sender = HandoffLife(NUM_BLOCKS), _Sender()
    for item in plan:
        event = BlocksReady(list(range(life.num_ready, life.num_ready + item))) if isinstance(item, int) else item
        before = msgspec.structs.replace(life)
        try:
            after, commands = step(life, event)
        except InvalidTransition:
            assert life == before
            continue
        if isinstance(event, PushEnded):
            sender.num_reading -= 1
        if isinstance(event, BlocksMissing | ReceiverCommitted):
            sender.is_asked = False
        after.validate()
        sender.carry_out(commands)
        life = after
        assert sender.num_reading == life.num_pushes
        assert sender.num_released == (1 if life.is_over else 0)
        if life.state is HandoffState.FINISHING:  # and then the receiver does not wait for ever
            assert sender.is_asked
            assert sender.is_all_sent == (life.num_pushes == 0)
    # Giving up and the end of what is under way always lead to the end.
    life, commands = step(life, LEFT)
    sender.carry_out(commands)
    while life.num_pushes:
        sender.num_reading -= 1
        life, commands = step(life, PushEnded())
        sender.carry_out(commands)
    assert life.is_over
    assert sender.num_released == 1


def _lives() -> list[HandoffLife]:
    return [
        HandoffLife(NUM_BLOCKS),
        run(BlocksReady([0]))[0],
        run(*ALL_PUSHED)[0],
        run(*ALL_PUSHED, PushEnded())[0],
        run(*ALL_PUSHED, ReceiverCommitted())[0],
        run(BlocksReady([0]), LEFT)[0],
        run(*ALL_PUSHED, PushEnded(), ReceiverCommitted())[0],
    ]


LEGAL: list[set[type]] = [
    {BlocksReady, HandoffGivenUp},
    {PushEnded, HandoffGivenUp},
    {PushEnded, BlocksMissing, ReceiverCommitted, HandoffGivenUp},
    {BlocksMissing, ReceiverCommitted, HandoffGivenUp},
    {PushEnded, HandoffGivenUp},
    {BlocksReady, PushEnded, PromptComputed, BlocksMissing, ReceiverCommitted, HandoffGivenUp},
    {HandoffGivenUp},
]


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize(
    "event", [BlocksReady([0]), PushEnded(), PromptComputed(FIRST), BlocksMissing([0]), ReceiverCommitted(), LEFT]
)
def test_exactly_the_events_of_the_table_are_taken(place: int, event: HandoffEvent) -> None:
    life = _lives()[place]
    before = msgspec.structs.replace(life)
    if type(event) in LEGAL[place]:
        step(life, event)[0].validate()
    else:
        with pytest.raises(InvalidTransition):
            step(life, event)
    assert life == before
