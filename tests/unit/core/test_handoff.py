"""The handoff's machine: whatever happens, our blocks are released exactly once, and only when nothing reads them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_core.errors import Cancelled, InvalidTransition, TransferError
from pd_core.handoff import (
    MAX_ROUNDS,
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
    assert commands == [Push([0, 1]), Push([2, 3]), AskVerdict(FIRST), ReleaseBlocks()]
    assert life.is_over


def test_the_receiver_is_asked_only_when_no_push_is_under_way_and_the_prompt_is_done() -> None:
    still_pushing, commands = run(*ALL_PUSHED)
    assert AskVerdict(FIRST) not in commands
    assert still_pushing.state is HandoffState.PUSHING
    still_computing, commands = run(BlocksReady([0, 1]), PushEnded())
    assert AskVerdict(FIRST) not in commands
    assert still_computing.state is HandoffState.PUSHING


def test_sent_is_not_enough_to_release() -> None:
    _, commands = run(*ALL_PUSHED, PushEnded())
    assert ReleaseBlocks() not in commands


def test_missing_blocks_are_sent_again_and_asked_for_again() -> None:
    life, commands = run(*ALL_PUSHED, PushEnded(), BlocksMissing([1, 3]))
    assert commands[-1] == Push([1, 3])
    life, commands = step(life, PushEnded())
    assert commands == [AskVerdict(FIRST)]
    _, commands = step(life, ReceiverCommitted())
    assert commands == [ReleaseBlocks()]


def test_blocks_that_never_arrive_are_given_up_after_so_many_rounds() -> None:
    again: list[HandoffEvent] = [BlocksMissing([0]), PushEnded()]
    life, _ = run(*ALL_PUSHED, PushEnded(), *again * MAX_ROUNDS)
    life, commands = step(life, BlocksMissing([0]))
    assert isinstance(commands[0], StopPushes)
    assert isinstance(commands[0].error, TransferError)
    assert commands[1:] == [ReleaseBlocks()]


@pytest.mark.parametrize("indices", [[], [NUM_BLOCKS], [-1], [0, 99]])
def test_a_verdict_that_cannot_be_meant_ends_the_handoff(indices: list[int]) -> None:
    life, commands = run(*ALL_PUSHED, PushEnded(), BlocksMissing(indices))
    assert isinstance(commands[-2], StopPushes)
    assert commands[-1] == ReleaseBlocks()
    assert life.is_over


def test_blocks_are_not_released_while_a_push_reads_them() -> None:
    life, commands = run(BlocksReady([0]), BlocksReady([1]), LEFT)
    assert commands[-1] == StopPushes(LEFT.error)
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
    assert commands == [StopPushes(LEFT.error), ReleaseBlocks()]


def test_a_handoff_that_has_nothing_to_ship_asks_at_once() -> None:
    _, commands = run(PromptComputed(FIRST), num_blocks=0)
    assert commands == [AskVerdict(FIRST)]


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
        {"state": HandoffState.FINISHING, "num_ready": 4, "num_pushes": 1},
        {"state": HandoffState.FINISHING, "num_ready": 3},
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
    """Counts what reads our blocks, as the commands and events say."""

    def __init__(self) -> None:
        self.num_reading = 0
        self.num_released = 0

    def carry_out(self, commands: list[HandoffCommand]) -> None:
        for command in commands:
            assert not self.num_released, "nothing may be done with blocks that are released"
            match command:
                case Push():
                    self.num_reading += 1
                case AskVerdict():
                    assert self.num_reading == 0
                case ReleaseBlocks():
                    assert self.num_reading == 0
                    self.num_released += 1
                case StopPushes():
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
        after.validate()
        sender.carry_out(commands)
        life = after
        assert sender.num_reading == life.num_pushes
        assert sender.num_released == (1 if life.is_over else 0)
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
    """A handoff in each state; the first three are PUSHING."""
    return [
        HandoffLife(NUM_BLOCKS),
        run(BlocksReady([0]))[0],
        run(*ALL_PUSHED)[0],
        run(*ALL_PUSHED, PushEnded())[0],
        run(BlocksReady([0]), LEFT)[0],
        run(*ALL_PUSHED, PushEnded(), ReceiverCommitted())[0],
    ]


LEGAL: list[set[type]] = [
    {BlocksReady, HandoffGivenUp},
    {PushEnded, HandoffGivenUp},
    {PushEnded, HandoffGivenUp},
    {BlocksMissing, ReceiverCommitted, HandoffGivenUp},
    {BlocksReady, PushEnded, PromptComputed, BlocksMissing, ReceiverCommitted, HandoffGivenUp},
    {HandoffGivenUp},
]


@pytest.mark.parametrize("place", range(6))
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
