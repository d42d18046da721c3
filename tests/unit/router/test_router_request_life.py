"""The request's machine: any order of events comes to an end, no leg stays open, every index is delivered once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_core.errors import InvalidTransition, KvrelayError, ProtocolError, TokenMismatch, Unavailable, WorkerLost
from pd_core.request import FinishReason
from pd_core.request_life import (
    AnswerComplete,
    ClientLeft,
    CloseLeg,
    Deliver,
    Fail,
    KvCommitted,
    Leg,
    LegEnded,
    LegFailed,
    LegRefused,
    OpenBoth,
    OpenDecode,
    OpenPrefill,
    Placed,
    PromptTaken,
    RequestCommand,
    RequestEvent,
    RequestLife,
    RequestState,
    SequencePreempted,
    TicketReceived,
    TimeRanOut,
    TokenReceived,
    step,
    usual_token,
)
from pd_core.ticket import Ticket, TicketRef

TICKET = Ticket(TicketRef("t", "boot-1", 1, 1), "r", 0, [0], 3.0, "127.0.0.1", 1, [])
PLACED = Placed(prefill="p0", decode="d0")
ON_ONE = Placed(prefill=None, decode="d0")
LOST = WorkerLost("d0 is lost")
OVER = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


def token(leg: Leg, index: int, value: int = 7, finish: FinishReason | None = None) -> TokenReceived:
    return TokenReceived(leg, index, value, finish)


def run(*events: RequestEvent) -> tuple[RequestLife, list[RequestCommand]]:
    """The life after these events, and the commands of the last."""
    life, commands = RequestLife("r"), []
    for event in events:
        life, commands = step(life, event)
        life.validate()
    return life, commands


def test_a_request_goes_over_both_legs_and_closes_them_at_its_last_token() -> None:
    life, commands = run(PLACED)
    assert (life.state, commands) == (RequestState.RESERVING, [OpenDecode("d0")])
    life, commands = run(PLACED, TicketReceived(TICKET))
    assert (life.state, commands) == (RequestState.PREFILLING, [OpenPrefill("p0", TICKET)])
    told = [PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0), KvCommitted(), LegEnded(Leg.PREFILL)]
    life, commands = run(*told, token(Leg.DECODE, 0))
    assert (life.state, commands) == (RequestState.DECODING, [])  # decode's copy of the first token
    life, commands = run(*told, token(Leg.DECODE, 0), token(Leg.DECODE, 1, finish=FinishReason.LENGTH))
    assert life.state is RequestState.FINISHED
    assert commands == [Deliver(1, 7, FinishReason.LENGTH), CloseLeg(Leg.DECODE)]


def test_with_both_phases_on_one_worker_there_is_one_leg_from_the_beginning_to_the_end() -> None:
    life, commands = run(ON_ONE)
    assert (life.state, commands) == (RequestState.RESERVING, [OpenBoth("d0")])
    life, commands = run(ON_ONE, PromptTaken())
    assert (life.state, life.open_legs, commands) == (RequestState.PREFILLING, frozenset({Leg.DECODE}), [])
    told = [ON_ONE, PromptTaken(), token(Leg.DECODE, 0)]
    life, commands = run(*told)
    assert (life.state, commands) == (RequestState.DECODING, [Deliver(0, 7, None)])
    life, commands = run(*told, token(Leg.DECODE, 1, finish=FinishReason.LENGTH))
    assert commands == [Deliver(1, 7, FinishReason.LENGTH), CloseLeg(Leg.DECODE)]


def test_a_worker_of_both_phases_may_refuse_too_and_the_next_placement_may_have_two_legs() -> None:
    life, commands = run(ON_ONE, LegRefused(Leg.DECODE))
    assert (life.state, commands) == (RequestState.QUEUED, [CloseLeg(Leg.DECODE)])
    assert run(ON_ONE, LegRefused(Leg.DECODE), PLACED)[1] == [OpenDecode("d0")]


@pytest.mark.parametrize("end", [LegEnded(Leg.DECODE), LegFailed(Leg.DECODE, LOST)])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_only_leg_cannot_be_done_without(end: RequestEvent, length: int) -> None:
    life, commands = run(*[ON_ONE, PromptTaken(), token(Leg.DECODE, 0)][:length], end)
    assert life.state is RequestState.FAILED
    assert isinstance(commands[0], Fail)


@pytest.mark.parametrize(
    "told",
    [
        [ON_ONE, PromptTaken()],
        [ON_ONE, PromptTaken(), token(Leg.DECODE, 0)],
        [PLACED, TicketReceived(TICKET), KvCommitted()],
        [PLACED, TicketReceived(TICKET), KvCommitted(), token(Leg.DECODE, 0)],
        [PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0), KvCommitted(), token(Leg.DECODE, 0)],
    ],
)
def test_a_preemption_changes_nothing_for_the_stream(told: list[RequestEvent]) -> None:
    before, _ = run(*told)
    life, commands = step(before, SequencePreempted(before.num_of_decode))
    assert (life.state, life.open_legs, commands) == (before.state, before.open_legs, [])
    assert life.num_preemptions == 1
    life, commands = step(life, token(Leg.DECODE, before.num_of_decode))
    assert life.state is RequestState.DECODING
    assert all(isinstance(command, Deliver) for command in commands)


def test_a_preemption_that_counts_other_tokens_than_have_come_fails_the_request() -> None:
    _, commands = run(ON_ONE, PromptTaken(), token(Leg.DECODE, 0), SequencePreempted(2))
    assert isinstance(commands[0], Fail)
    assert isinstance(commands[0].error, ProtocolError)


def test_a_first_token_that_ends_the_request_cancels_the_ticket() -> None:
    life, commands = run(PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0, finish=FinishReason.STOP))
    assert life.state is RequestState.FINISHED
    assert commands == [Deliver(0, 7, FinishReason.STOP), CloseLeg(Leg.PREFILL), CloseLeg(Leg.DECODE)]


def test_a_refusal_puts_the_request_back_and_the_next_placement_is_another_attempt() -> None:
    life, commands = run(PLACED, LegRefused(Leg.DECODE))
    assert (life.state, life.attempt, commands) == (RequestState.QUEUED, 1, [CloseLeg(Leg.DECODE)])
    life, _ = run(PLACED, LegRefused(Leg.DECODE), Placed(prefill="p1", decode="d1"))
    assert (life.state, life.attempt, life.decode) == (RequestState.RESERVING, 2, "d1")


def test_a_refusal_by_prefill_gives_the_ticket_up_and_puts_the_request_back_too() -> None:
    refused = [PLACED, TicketReceived(TICKET), LegRefused(Leg.PREFILL)]
    life, commands = run(*refused)
    assert (life.state, life.attempt) == (RequestState.QUEUED, 1)
    assert commands == [CloseLeg(Leg.PREFILL), CloseLeg(Leg.DECODE)]
    life, commands = run(*refused, Placed(prefill="p1", decode="d1"))
    assert (life.state, life.attempt, commands) == (RequestState.RESERVING, 2, [OpenDecode("d1")])


@pytest.mark.parametrize("length", range(5))
@pytest.mark.parametrize("leg", list(Leg))
def test_who_may_refuse_can_be_asked_before_and_is_what_the_table_says(leg: Leg, length: int) -> None:
    told: list[RequestEvent] = [PLACED, TicketReceived(TICKET), KvCommitted(), token(Leg.DECODE, 0)]
    life, _ = run(*told[:length])
    if life.may_be_refused_by(leg):
        assert step(life, LegRefused(leg))[0].state is RequestState.QUEUED
    else:
        with pytest.raises(InvalidTransition):
            step(life, LegRefused(leg))


def test_two_copies_of_a_token_that_differ_fail_the_request() -> None:
    life, commands = run(PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0, 7), token(Leg.DECODE, 0, 8))
    assert life.state is RequestState.FAILED
    assert isinstance(commands[0], Fail)
    assert isinstance(commands[0].error, TokenMismatch)


@pytest.mark.parametrize(
    "tokens",
    [
        [token(Leg.DECODE, 1)],
        [token(Leg.PREFILL, 1)],
        [token(Leg.PREFILL, 0), token(Leg.PREFILL, 0)],
        [token(Leg.PREFILL, 0), token(Leg.PREFILL, 1)],
        [token(Leg.PREFILL, 0), token(Leg.DECODE, 1)],
        [token(Leg.DECODE, 0), token(Leg.DECODE, 0)],
        [token(Leg.DECODE, 0), token(Leg.DECODE, 1), token(Leg.DECODE, 1)],
        [token(Leg.DECODE, 0), token(Leg.DECODE, 2)],
        [token(Leg.DECODE, -1)],
    ],
)
def test_a_token_that_is_out_of_its_legs_turn_fails_the_request(tokens: list[RequestEvent]) -> None:
    _, commands = run(PLACED, TicketReceived(TICKET), *tokens)
    assert isinstance(commands[0], Fail)
    assert isinstance(commands[0].error, ProtocolError)


def test_prefills_token_may_come_after_many_of_decode() -> None:
    told = [PLACED, TicketReceived(TICKET), KvCommitted(), *(token(Leg.DECODE, index, 7 + index) for index in range(3))]
    life, commands = run(*told, token(Leg.PREFILL, 0, 7))
    assert (life.num_tokens, commands) == (3, [])
    _, commands = run(*told, token(Leg.PREFILL, 0, 8))
    assert isinstance(commands[0], Fail)
    assert isinstance(commands[0].error, TokenMismatch)


@pytest.mark.parametrize("last", [LegEnded(Leg.PREFILL), LegFailed(Leg.PREFILL, LOST)])
def test_once_decode_owns_the_kv_the_prefill_leg_does_not_matter(last: RequestEvent) -> None:
    """Decode may commit, and say so, before the prefill worker's token has made its way to us."""
    life, commands = run(PLACED, TicketReceived(TICKET), KvCommitted(), last)
    assert (life.open_legs, commands) == (frozenset({Leg.DECODE}), [])
    life, commands = step(life, token(Leg.DECODE, 0))
    assert commands == [Deliver(0, 7, None)]


@pytest.mark.parametrize("leg", list(Leg))
def test_before_the_commit_the_loss_of_either_leg_fails_the_request(leg: Leg) -> None:
    life, commands = run(PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0), LegFailed(leg, LOST))
    assert life.state is RequestState.FAILED
    assert commands == [Fail(LOST), CloseLeg(Leg.PREFILL), CloseLeg(Leg.DECODE)]


def test_a_prefill_leg_that_ends_without_a_token_or_a_commit_fails_the_request() -> None:
    assert run(PLACED, TicketReceived(TICKET), LegEnded(Leg.PREFILL))[0].state is RequestState.FAILED


def test_the_client_may_leave_in_every_state() -> None:
    path: list[RequestEvent] = [PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0)]
    for length in range(len(path) + 1):
        life, commands = run(*path[:length], ClientLeft())
        assert life.state is RequestState.CANCELLED
        assert len(commands) == min(length, 2)  # as many legs as were open


@pytest.mark.parametrize(
    "events",
    [
        [TicketReceived(TICKET)],
        [token(Leg.DECODE, 0)],
        [LegRefused(Leg.DECODE)],
        [LegRefused(Leg.PREFILL)],
        [KvCommitted()],
        [LegEnded(Leg.DECODE)],
        [PLACED, PLACED],
        [PLACED, token(Leg.DECODE, 0)],
        [PLACED, KvCommitted()],
        [PLACED, TicketReceived(TICKET), TicketReceived(TICKET)],
        [PLACED, LegRefused(Leg.PREFILL)],
        [PLACED, TicketReceived(TICKET), LegRefused(Leg.DECODE)],
        [PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0), LegRefused(Leg.PREFILL)],
        [PLACED, TicketReceived(TICKET), KvCommitted(), LegRefused(Leg.PREFILL)],
        [PLACED, TicketReceived(TICKET), KvCommitted(), KvCommitted()],
        [ClientLeft(), PLACED],
        [PromptTaken()],
        [PLACED, PromptTaken()],
        [ON_ONE, TicketReceived(TICKET)],
        [ON_ONE, PromptTaken(), PromptTaken()],
        [ON_ONE, PromptTaken(), KvCommitted()],
        [ON_ONE, PromptTaken(), LegRefused(Leg.DECODE)],
        [ON_ONE, SequencePreempted(0)],
        [PLACED, TicketReceived(TICKET), SequencePreempted(0)],
        [PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0), SequencePreempted(0)],
    ],
)
def test_an_event_that_fits_nowhere_raises_and_changes_nothing(events: list[RequestEvent]) -> None:
    life, _ = run(*events[:-1])
    before = life.story()
    with pytest.raises(InvalidTransition):
        step(life, events[-1])
    assert life.story() == before


def test_every_token_of_decode_but_the_first_and_the_last_is_usual() -> None:
    life, _ = run(PLACED, TicketReceived(TICKET), token(Leg.PREFILL, 0), KvCommitted())
    assert usual_token(life, Leg.DECODE, 0, None) is None
    life, _ = step(life, token(Leg.DECODE, 0))
    for index in range(1, 5):
        longer = usual_token(life, Leg.DECODE, index, None)
        assert longer is not None
        life, _ = step(life, token(Leg.DECODE, index))
        assert longer == life
    assert usual_token(life, Leg.DECODE, 5, FinishReason.LENGTH) is None


@pytest.mark.parametrize(
    ("events", "leg", "index"),
    [
        ([PLACED, TicketReceived(TICKET), KvCommitted()], Leg.DECODE, 0),
        ([PLACED, TicketReceived(TICKET), token(Leg.DECODE, 0)], Leg.PREFILL, 0),
        ([PLACED, TicketReceived(TICKET), token(Leg.DECODE, 0)], Leg.PREFILL, 1),
        ([PLACED, TicketReceived(TICKET), token(Leg.DECODE, 0)], Leg.DECODE, 0),
        ([PLACED, TicketReceived(TICKET), token(Leg.DECODE, 0)], Leg.DECODE, 2),
        ([PLACED, TicketReceived(TICKET), token(Leg.DECODE, 0), ClientLeft()], Leg.DECODE, 1),
        ([ON_ONE, PromptTaken()], Leg.DECODE, 0),
    ],
)
def test_any_other_token_goes_through_the_table(events: list[RequestEvent], leg: Leg, index: int) -> None:
    life, _ = run(*events)
    assert usual_token(life, leg, index, None) is None


class AnyOrder(RuleBasedStateMachine):
    """Throws every event at the machine in any order, and keeps its own account of legs and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.life = RequestLife("r")
        self.open: set[Leg] = set()
        self.delivered: list[int] = []  # tokens, each at its index
        self.num_ends = 0

    def throw(self, event: RequestEvent) -> None:
        before = self.life
        if isinstance(event, TokenReceived):
            longer = usual_token(before, event.leg, event.index, event.finish)
            assert longer is None or step(before, event) == (longer, [Deliver(event.index, event.token, None)])
        try:
            self.life, commands = step(before, event)
        except InvalidTransition:
            assert self.life is before
            return
        if before.is_over:
            assert self.life is before
            assert commands == []
        for command in commands:
            match command:
                case OpenDecode() | OpenBoth():
                    assert not self.open
                    assert isinstance(command, OpenBoth) == (self.life.prefill is None)
                    self.open.add(Leg.DECODE)
                case OpenPrefill():
                    assert self.open == {Leg.DECODE}
                    self.open.add(Leg.PREFILL)
                case CloseLeg(leg=leg):
                    self.open.remove(leg)
                case Deliver(index=index, token=value):
                    assert index == len(self.delivered)
                    self.delivered.append(value)
                case Fail():
                    assert self.life.state is RequestState.FAILED
                    self.num_ends += 1
        # A leg that reports its end is closed without a command.
        if isinstance(event, LegEnded | LegFailed):
            self.open.discard(event.leg) if event.leg not in self.life.open_legs else None

    @rule(event=st.sampled_from([PLACED, ON_ONE, TicketReceived(TICKET), PromptTaken(), KvCommitted()]))
    def progress(self, event: RequestEvent) -> None:
        self.throw(event)

    @rule(
        leg=st.sampled_from(Leg),
        ahead=st.sampled_from([0, 0, 0, -1, 1]),
        value=st.sampled_from([7, 7, 7, 8]),
        finish=st.sampled_from([None, None, None, FinishReason.STOP]),
    )
    def a_token(self, leg: Leg, ahead: int, value: int, finish: FinishReason | None) -> None:
        before = self.life
        brought = before.num_of_decode if leg is Leg.DECODE else before.num_of_prefill
        index = max(0, brought + ahead)
        self.throw(token(leg, index, value, finish))
        if self.life.is_over and not before.is_over and self.life.state is RequestState.FAILED:
            is_out_of_turn = index != brought or (leg is Leg.PREFILL and brought > 0)
            assert is_out_of_turn or value != self.delivered[index]

    @rule(surplus=st.sampled_from([0, 0, 0, 1, -1]))
    def a_preemption(self, surplus: int) -> None:
        before = self.life
        self.throw(SequencePreempted(before.num_of_decode + surplus))
        assert self.life.is_over or self.life.state is before.state
        assert surplus == 0 or self.life.num_preemptions == before.num_preemptions

    @rule(leg=st.sampled_from(Leg), is_failure=st.booleans())
    def a_leg_ends(self, leg: Leg, is_failure: bool) -> None:
        self.throw(LegFailed(leg, LOST) if is_failure else LegEnded(leg))

    @rule(leg=st.sampled_from(Leg))
    def a_refusal(self, leg: Leg) -> None:
        is_allowed, attempt = self.life.may_be_refused_by(leg), self.life.attempt
        was_over = self.life.is_over
        self.throw(LegRefused(leg))
        assert (self.life.state is RequestState.QUEUED and not was_over) or not is_allowed
        assert self.life.attempt == attempt
        assert not is_allowed or not self.delivered

    @precondition(lambda self: len(self.delivered) > 2)
    @rule(event=st.sampled_from([ClientLeft(), AnswerComplete(), TimeRanOut(Unavailable("too late"))]))
    def an_end_from_outside(self, event: RequestEvent) -> None:
        self.throw(event)

    @invariant()
    def the_machine_agrees_with_our_account(self) -> None:
        self.life.validate()
        assert set(self.life.open_legs) == self.open
        assert self.life.num_tokens == len(self.delivered)
        assert self.num_ends <= 1

    def teardown(self) -> None:
        """Wherever it stopped, time brings it to an end, and then nothing is open."""
        self.throw(TimeRanOut(KvrelayError("the end")))
        assert self.life.state in OVER
        assert not self.open


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyOrderOfEvents = AnyOrder.TestCase
