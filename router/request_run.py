"""The shell of one request: carries out what its machine (pd_core.request_life) commands, and decides nothing.

    host --Placed--> machine --Open...--> a task per leg --messages as events--> machine
                        '--Deliver, Fail--> the buffer that the client's side reads

A leg is one stream of one worker, read by one task. The buffer (`unread`) needs no bound of its own: it holds what the
client has not read yet, so at most the request's `max_tokens`, which fit into the context; thus a client that reads
slowly holds up nobody else on the worker's connection and loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pd_core.errors import Cancelled, DeadlineExceeded, KvrelayError, WorkerLost
from pd_core.messages import (
    HandoffCommitted,
    PrefillDone,
    PromptComputed,
    StartBoth,
    StartDecode,
    StartPrefill,
    TokenMade,
)
from pd_core.request import GenerateRequest
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
from router.legs import LegCall, PlacedLeg, event_of, event_of_error, read_leg
from router.policy import Demand, Placement
from router.run_host import RunHost
from router.step_clock import StepClock, StepDeadlines
from router.timeline import PlacementNote, Timeline
from router.unread import TokenEvent, UnreadTokens
from router.view import WorkerRef

logger = logging.getLogger(__name__)


class RequestRun:
    """One request, from its turn in the queue to its last token.

    arrived_s: when the client's request began to arrive; deadline_s: how long the whole may take from then on
    """

    def __init__(
        self,
        request: GenerateRequest,
        host: RunHost[RequestRun],
        *,
        arrived_s: float,
        deadline_s: float,
        steps: StepDeadlines,
    ) -> None:
        self.request = request
        self.timeline = Timeline(request.request_id, len(request.tokens), arrived_s, queued_s=host.now_s())
        self.demand = Demand(len(request.tokens), request.max_tokens, since_s=self.timeline.queued_s)
        self.number = 0
        """In the line; set when it has had its turn."""
        self._host = host
        self._linger_s = steps.linger_s
        self._clock = StepClock(steps)
        self._life = RequestLife(request.request_id)
        self._legs: dict[Leg, PlacedLeg] = {}
        self._taking: Leg | None = None
        """The leg whose message is being taken through the machine."""
        self._ends_s = arrived_s + deadline_s
        self._deadline_s = deadline_s
        self._placement: Placement | None = None
        self._unread = UnreadTokens(request.first_index)
        self._news: Callable[[], None] = lambda: None
        self._error: KvrelayError | None = None

    # what the client's side uses

    @property
    def life(self) -> RequestLife:
        return self._life

    async def next_events(self) -> list[TokenEvent]:
        """All tokens that have come since the last call, at least one; empty when the stream has ended well.

        Raises what the request failed with, after its tokens have been read; Cancelled after `leave`.
        """
        while (events := self.take_events()) is None:
            reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.watch(partial(_wake, reader))
            await reader
        return events

    def take_events(self) -> list[TokenEvent] | None:
        """The same without waiting: None when nothing has come."""
        if events := self._unread.take():
            return events
        if not self._life.is_over:
            return None
        if self._error is not None:
            raise self._error
        if self._life.state is RequestState.CANCELLED:
            raise Cancelled(f"the client has left: {self._life.story()}")
        return []

    def watch(self, on_news: Callable[[], None]) -> None:
        """Has `on_news` called whenever there may be something to take; who watched before does so no more."""
        self._news = on_news

    def given(self, events: Iterable[TokenEvent]) -> None:
        """The reader has made these a part of the answer: they count. Those behind a stop string never do."""
        timeline = self.timeline
        for event in events:
            last_s, timeline.last_token_s = timeline.last_token_s, event.at_s
            timeline.num_tokens += 1
            self._host.token_given(None if last_s is None else event.at_s - last_s)

    def leave(self) -> None:
        """Nobody reads any more. Nothing happens when the request is over."""
        self.feed(ClientLeft())

    def complete(self) -> None:
        """The tokens that were read are all that the client asked for: ends well, and stops the work at once."""
        self.feed(AnswerComplete())

    # what the host uses

    @property
    def work_id(self) -> str:
        """Names this request's present attempt on its workers; what is late of an earlier one has another name."""
        return f"{self.request.request_id}#{self._life.attempt}"

    def place(self, placement: Placement) -> None:
        """It is this request's turn."""
        self._placement = placement
        self.feed(Placed(prefill=placement.prefill, decode=placement.decode))

    def fail(self, error: KvrelayError) -> None:
        """Ends it with this error. Nothing happens when it is over."""
        self.feed(TimeRanOut(error))

    def worker_lost(self, ref: WorkerRef, why: str) -> None:
        """A worker is given up; legs that it holds have failed."""
        for leg in sorted(self._life.open_legs, key=lambda leg: leg.value):
            placed = self._legs[leg]
            if placed.ref == ref:
                self.feed(LegFailed(leg, WorkerLost(f"{leg.value} worker {ref.name} {why}")))
                if placed.task is not None:  # to the machine it has ended; its stream may be as silent as ever
                    placed.task.cancel()
                return

    def check_time(self, now_s: float) -> None:
        """Ends the request when its deadline, or that of the step it is in, has passed."""
        if self._life.is_over:
            return
        if now_s >= self._ends_s:
            self.fail(DeadlineExceeded(f"not finished within {self._deadline_s:g} s: {self._life.story()}"))
        elif self._legs and self._clock.is_late(now_s, self._host.progress_s(self._legs[Leg.DECODE].ref)):
            self.fail(DeadlineExceeded(f"no progress in time: {self._life.story()}"))

    def feed(self, event: RequestEvent) -> None:
        """Takes an event through the machine. Raises InvalidTransition when it fits nowhere; nothing has changed."""
        before = self._life
        self._life, commands = step(before, event)
        now_s = self._host.now_s()
        if self._life is not before:
            self._note(event, now_s)
        for command in commands:
            if type(command) is Deliver:  # nearly every command
                self._deliver(command, now_s)
            else:
                self._carry_out(command, now_s)
        if self._life.state is not before.state and self._life.is_over:
            self._end(now_s)
        elif isinstance(event, LegRefused) and self._life is not before:
            self._give_turn_back(event.leg)

    # inside

    def _note(self, event: RequestEvent, now_s: float) -> None:
        """Writes down what has happened, and tells the clock and the host of it."""
        timeline, clock = self.timeline, self._clock
        match event:
            case TokenReceived():  # first: nearly every event
                # A late copy of the first token, prefill's, does not end a preemption: decode's sequence waits on.
                if (event.leg is Leg.DECODE or not clock.is_preempted) and clock.token_came(now_s):
                    self._host.leg_resumed(self._legs[Leg.DECODE].ref, self.work_id)
            case Placed():
                self._note_placement(event, now_s)
                clock.placed(now_s)
            case TicketReceived() | PromptTaken():
                timeline.reserved_s = now_s
                clock.taken(timeline.num_prompt, now_s)
                self._host.leg_admitted(self._legs[Leg.DECODE].ref, self.work_id)
            case KvCommitted():
                timeline.committed_s = now_s
            case SequencePreempted() if not self._life.is_over:
                timeline.num_preemptions += 1
                timeline.preempted_s = now_s
                clock.preempted(now_s)
                self._host.leg_preempted(self._legs[Leg.DECODE].ref, self.work_id)
            case LegRefused():
                timeline.turn_given_back()
                clock.stop()

    def _note_placement(self, event: Placed, now_s: float) -> None:
        names = {Leg.PREFILL: event.prefill, Leg.DECODE: event.decode}
        self._legs = {leg: PlacedLeg(self._host.ref_of(name)) for leg, name in names.items() if name is not None}
        chosen = self._placement
        assert chosen is not None  # noqa: S101 - `place` alone feeds this event
        note = PlacementNote(now_s, event.prefill, event.decode, chosen.reason, chosen.num_ahead, chosen.expected_s)
        self.timeline.placed(note, self._life.attempt)

    def _carry_out(self, command: RequestCommand, now_s: float) -> None:
        match command:
            case OpenDecode():
                self._open_leg(Leg.DECODE, StartDecode(self.request, self._life.attempt), now_s)
            case OpenBoth():
                self._open_leg(Leg.DECODE, StartBoth(self.request, self._life.attempt), now_s)
            case OpenPrefill(ticket=ticket):
                self._open_leg(Leg.PREFILL, StartPrefill(self.request, ticket), now_s)
            case CloseLeg(leg=leg):
                self._close_leg(leg)
            case Fail(error=error):
                self._error = error

    def _deliver(self, command: Deliver, now_s: float) -> None:
        if command.index == 0:
            self.timeline.first_token_s = now_s
            computing = Leg.PREFILL if Leg.PREFILL in self._legs else Leg.DECODE
            self._host.prompt_computed(self._legs[computing].ref, self.work_id, self.timeline.num_prompt)
        self._unread.add(command.token, command.finish, now_s)
        self._news()

    def _end(self, now_s: float) -> None:
        self.timeline.ended_s = now_s
        self.timeline.outcome = self._life.state.value
        if self._error is not None:
            self.timeline.error = self._error.code
        self._news()
        legs, self._legs = self._legs, {}
        self._host.run_over(self)
        self._release_unopened(legs, self.work_id)

    def _give_turn_back(self, refused_by: Leg) -> None:
        legs, self._legs, work_id = self._legs, {}, self.work_id
        self._host.turn_given_back(self, legs[refused_by].ref)
        self._release_unopened(legs, work_id)

    def _release_unopened(self, legs: dict[Leg, PlacedLeg], work_id: str) -> None:
        """A placement counts on both workers, but the prefill leg is opened only once the ticket is there.

        Comes last: a place that is free gives the next in the queue its turn, and that may be this very request.
        """
        for leg in legs.values():
            if leg.task is None:
                self._host.leg_over(leg.ref, work_id, 0, None)

    def _open_leg(self, leg: Leg, body: LegCall, now_s: float) -> None:
        ref, work_id = self._legs[leg].ref, self.work_id
        remaining_s = max(self._ends_s - now_s, 0.001)
        running = self._run_leg(leg, ref, body, remaining_s, self._life.attempt)
        task = asyncio.get_running_loop().create_task(running, name=f"{work_id}:{leg.value}")
        self._legs[leg].task = task
        self._host.leg_opened(task)
        # Not in the task's own `finally`: one that is cancelled before its first step never comes there.
        task.add_done_callback(lambda _: self._leg_over(ref, work_id, task))

    def _leg_over(self, ref: WorkerRef, work_id: str, task: asyncio.Task[None]) -> None:
        self._host.leg_over(ref, work_id, self._life.num_tokens, task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("a leg broke down", exc_info=fault, extra={"request_id": self.request.request_id})
            self.fail(KvrelayError("internal error in the router; see its log"))

    def _close_leg(self, leg: Leg) -> None:
        task = self._legs[leg].task
        if task is None or leg is self._taking or task is asyncio.current_task():
            return  # its own task sees for itself that the leg is closed
        if self._life.state is RequestState.FINISHED and leg is Leg.PREFILL:
            # Its work is done, only its last word is on the way: cancelling would count as an abort there.
            asyncio.get_running_loop().call_later(self._linger_s, task.cancel)
        else:
            task.cancel()

    async def _run_leg(self, leg: Leg, ref: WorkerRef, body: LegCall, deadline_s: float, attempt: int) -> None:
        """Reads one leg to its end and says what became of it."""
        try:
            async with self._host.open_stream(ref, body, deadline_s) as messages:
                await read_leg(messages, partial(self._take, leg, attempt), self._is_finished, self._linger_s)
            outcome: RequestEvent = LegEnded(leg)
        except Exception as error:
            outcome = event_of_error(leg, ref.name, error, self._life)
        if attempt == self._life.attempt and self._life.state is not RequestState.QUEUED:
            self.feed(outcome)  # else the leg was closed when the turn was given back, and this came too late

    def _take(self, leg: Leg, attempt: int, message: Any) -> bool:
        """A message of a leg has come; whether more of it is wanted. Called by the leg's stream, outside its task."""
        if type(message) is TokenMade and attempt == self._life.attempt:  # nearly every message
            longer = usual_token(self._life, leg, message.index - self.request.first_index, message.finish)
            if longer is not None:
                self._take_usual(longer, message.token)
                return True
        if type(message) is PrefillDone:  # a report; it is taken after the last token too
            self.timeline.prefilled(message)
            self._host.kv_sent(message.transfers)
        elif type(message) is PromptComputed:  # so is this
            self.timeline.prompt_computed(message)
        if attempt != self._life.attempt or leg not in self._life.open_legs:
            return False
        event = event_of(leg, message, self.request, self._life)
        if type(message) is HandoffCommitted:
            self.timeline.handed_over(message)
        if event is not None:
            self._taking = leg
            try:
                self.feed(event)
            finally:
                self._taking = None
        return leg in self._life.open_legs

    def _take_usual(self, longer: RequestLife, token: int) -> None:
        """What `feed` does for such a token."""
        self._life = longer
        now_s = self._host.now_s()
        if self._clock.token_came(now_s):
            self._host.leg_resumed(self._legs[Leg.DECODE].ref, self.work_id)
        self._unread.add(token, None, now_s)
        self._news()

    def _is_finished(self) -> bool:
        return self._life.state is RequestState.FINISHED


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
