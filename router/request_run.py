"""The shell of one request: carries out what its machine (pd_core.request_life) commands, and decides nothing.

    host --Placed--> machine --OpenDecode, OpenPrefill--> a task per leg --messages as events--> machine
                        '--Deliver, Fail--> the buffer that the client's side reads

A leg is one stream of one worker, read by one task. The buffer needs no bound of its own: it holds what the client has
not read yet, so at most the request's `max_tokens`, which fit into the context; thus a client that reads slowly holds
up nobody else on the worker's connection and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from pd_core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidTransition,
    KvrelayError,
    Overloaded,
    ProtocolError,
    WorkerLost,
)
from pd_core.messages import HandoffCommitted, PrefillDone, StartDecode, StartPrefill, TicketGranted, TokenMade
from pd_core.request import FinishReason, GenerateRequest
from pd_core.request_life import (
    ClientLeft,
    CloseLeg,
    Deliver,
    Fail,
    KvCommitted,
    Leg,
    LegEnded,
    LegFailed,
    LegRefused,
    OpenDecode,
    OpenPrefill,
    Placed,
    RequestCommand,
    RequestEvent,
    RequestLife,
    RequestState,
    TicketReceived,
    TimeRanOut,
    TokenReceived,
    step,
)
from router.policy import Demand, Placement
from router.timeline import Timeline
from router.view import WorkerRef

logger = logging.getLogger(__name__)


class TokenEvent(msgspec.Struct, frozen=True):
    """One token of the client's stream, in order. at_s: when it reached the router; finish: set on the last."""

    index: int
    token: int
    finish: FinishReason | None
    at_s: float


class StepDeadlines(msgspec.Struct, frozen=True):
    """How long one step of a request may take, whatever its own deadline.

    reserve_s:                  from the placement to the ticket
    first_token_s, prompt_token_s: from the ticket to the first token: a base, and for every prompt token
    next_token_s:               from one token to the next, the handoff's commit included
    linger_s:                   how long a leg whose work is done may take to say so, before it is cancelled
    """

    reserve_s: float = 5.0
    first_token_s: float = 60.0
    prompt_token_s: float = 0.1
    next_token_s: float = 60.0
    linger_s: float = 1.0


WorkerStream = AbstractAsyncContextManager[AsyncIterator[Any]]
"""A stream of a worker's messages; leaving it cancels what still runs. Raises the errors of pd_rpc."""


class RunHost(Protocol):
    """What a run needs of the router around it. All of it returns at once."""

    def now_s(self) -> float: ...

    def ref_of(self, worker: str) -> WorkerRef: ...

    def open_stream(self, ref: WorkerRef, body: msgspec.Struct, deadline_s: float) -> WorkerStream:
        """Raises WorkerLost when there is no connection to this boot."""
        ...

    def leg_opened(self, task: asyncio.Task[None]) -> None: ...

    def leg_started(self, ref: WorkerRef, work_id: str) -> None:
        """The leg's first result has come: the ticket, or the first token."""
        ...

    def leg_over(self, ref: WorkerRef, work_id: str, task: asyncio.Task[None] | None) -> None:
        """Nothing of this attempt is on that worker any more. task: None when the leg was never opened."""
        ...

    def turn_given_back(self, run: RequestRun, refused_by: WorkerRef) -> None: ...

    def token_came(self, gap_s: float | None) -> None: ...

    def run_over(self, run: RequestRun) -> None: ...


class _PlacedLeg(msgspec.Struct):
    """A leg of the present attempt: which boot of which worker it was placed on; no task before it is opened."""

    ref: WorkerRef
    task: asyncio.Task[None] | None = None


class RequestRun:
    """One request, from its turn in the queue to its last token.

    arrived_s: when the client's request began to arrive; deadline_s: how long the whole may take from then on
    """

    def __init__(
        self,
        request: GenerateRequest,
        host: RunHost,
        *,
        arrived_s: float,
        deadline_s: float,
        steps: StepDeadlines,
    ) -> None:
        self.request = request
        self.demand = Demand(len(request.tokens), request.max_tokens)
        self.timeline = Timeline(request.request_id, len(request.tokens), arrived_s, queued_s=host.now_s())
        self._host = host
        self._steps = steps
        self._life = RequestLife(request.request_id)
        self._legs: dict[Leg, _PlacedLeg] = {}
        self._ends_s = arrived_s + deadline_s
        self._deadline_s = deadline_s
        self._step_ends_s: float | None = None
        self._ready: list[TokenEvent] = []
        self._reader: asyncio.Future[None] | None = None
        self._error: KvrelayError | None = None

    # what the client's side uses

    @property
    def life(self) -> RequestLife:
        return self._life

    async def next_events(self) -> list[TokenEvent]:
        """All tokens that have come since the last call, at least one; empty when the stream has ended well.

        Raises what the request failed with, after its tokens have been read; Cancelled after `leave`.
        """
        while not self._ready:
            if self._life.is_over:
                if self._error is not None:
                    raise self._error
                if self._life.state is RequestState.CANCELLED:
                    raise Cancelled(f"the client has left: {self._life.story()}")
                return []
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._ready = self._ready, []
        return events

    def leave(self) -> None:
        """Nobody reads any more. Nothing happens when the request is over."""
        self.feed(ClientLeft())

    # what the host uses

    @property
    def work_id(self) -> str:
        """Names this request's present attempt on its workers; what is late of an earlier one has another name."""
        return f"{self.request.request_id}#{self._life.attempt}"

    def place(self, placement: Placement) -> None:
        """It is this request's turn."""
        self.timeline.reason = placement.reason
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
        elif self._step_ends_s is not None and now_s >= self._step_ends_s:
            self.fail(DeadlineExceeded(f"no progress in time: {self._life.story()}"))

    def feed(self, event: RequestEvent) -> None:
        """Takes an event through the machine. Raises InvalidTransition when it fits nowhere; nothing has changed."""
        before = self._life
        self._life, commands = step(before, event)
        now_s = self._host.now_s()
        if self._life is not before:
            self._note(event, now_s)
        for command in commands:
            self._carry_out(command, now_s)
        if self._life.is_over and not before.is_over:
            self._end(now_s)
        elif isinstance(event, LegRefused) and self._life is not before:
            self._give_turn_back(event.leg)

    # inside

    def _note(self, event: RequestEvent, now_s: float) -> None:
        """Writes down what has happened, and sets the deadline of the step that begins."""
        timeline, steps = self.timeline, self._steps
        match event:
            case TokenReceived():
                self._step_ends_s = now_s + steps.next_token_s
            case Placed(prefill=prefill, decode=decode):
                timeline.placed_s, timeline.num_attempts = now_s, self._life.attempt
                timeline.prefill, timeline.decode = prefill, decode
                names = {Leg.PREFILL: prefill, Leg.DECODE: decode}
                self._legs = {leg: _PlacedLeg(self._host.ref_of(name)) for leg, name in names.items()}
                self._step_ends_s = now_s + steps.reserve_s
            case TicketReceived():
                timeline.reserved_s = now_s
                prompt_s = steps.prompt_token_s * len(self.request.tokens)
                self._step_ends_s = now_s + steps.first_token_s + prompt_s
            case KvCommitted():
                timeline.committed_s = now_s
            case LegRefused():
                self._step_ends_s = None

    def _carry_out(self, command: RequestCommand, now_s: float) -> None:
        match command:
            case Deliver(index=index, token=token, finish=finish):
                self._deliver(TokenEvent(self.request.first_index + index, token, finish, now_s))
            case OpenDecode():
                self._open_leg(Leg.DECODE, StartDecode(self.request, self._life.attempt), now_s)
            case OpenPrefill(ticket=ticket):
                self._host.leg_started(self._legs[Leg.DECODE].ref, self.work_id)
                self._open_leg(Leg.PREFILL, StartPrefill(self.request, ticket), now_s)
            case CloseLeg(leg=leg):
                self._close_leg(leg)
            case Fail(error=error):
                self._error = error

    def _deliver(self, event: TokenEvent) -> None:
        timeline = self.timeline
        if timeline.last_token_s is None:
            timeline.first_token_s = event.at_s
            self._host.leg_started(self._legs[Leg.PREFILL].ref, self.work_id)
            self._host.token_came(None)
        else:
            self._host.token_came(event.at_s - timeline.last_token_s)
        timeline.last_token_s = event.at_s
        timeline.num_tokens += 1
        self._ready.append(event)
        self._wake_reader()

    def _end(self, now_s: float) -> None:
        self.timeline.ended_s = now_s
        self.timeline.outcome = self._life.state.value
        if self._error is not None:
            self.timeline.error = self._error.code
        self._wake_reader()
        legs, self._legs = self._legs, {}
        self._host.run_over(self)
        self._release_unopened(legs, self.work_id)

    def _give_turn_back(self, refused_by: Leg) -> None:
        legs, self._legs, work_id = self._legs, {}, self.work_id
        self._host.turn_given_back(self, legs[refused_by].ref)
        self._release_unopened(legs, work_id)

    def _release_unopened(self, legs: dict[Leg, _PlacedLeg], work_id: str) -> None:
        """A placement counts on both workers, but the prefill leg is opened only once the ticket is there.

        Comes last: a place that is free gives the next in the queue its turn, and that may be this very request.
        """
        for leg in legs.values():
            if leg.task is None:
                self._host.leg_over(leg.ref, work_id, None)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _open_leg(self, leg: Leg, body: StartDecode | StartPrefill, now_s: float) -> None:
        ref, work_id = self._legs[leg].ref, self.work_id
        remaining_s = max(self._ends_s - now_s, 0.001)
        running = self._run_leg(leg, ref, body, remaining_s, self._life.attempt)
        task = asyncio.get_running_loop().create_task(running, name=f"{work_id}:{leg.value}")
        self._legs[leg].task = task
        self._host.leg_opened(task)
        # Not in the task's own `finally`: one that is cancelled before its first step never comes there.
        task.add_done_callback(lambda _: self._leg_over(ref, work_id, task))

    def _leg_over(self, ref: WorkerRef, work_id: str, task: asyncio.Task[None]) -> None:
        self._host.leg_over(ref, work_id, task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("a leg broke down", exc_info=fault, extra={"request_id": self.request.request_id})
            self.fail(KvrelayError("internal error in the router; see its log"))

    def _close_leg(self, leg: Leg) -> None:
        task = self._legs[leg].task
        if task is None or task is asyncio.current_task():
            return  # a leg's own task sees for itself that the leg is closed
        if self._life.state is RequestState.FINISHED and leg is Leg.PREFILL:
            # Its work is done, only its last word is on the way: cancelling would count as an abort there.
            asyncio.get_running_loop().call_later(self._steps.linger_s, task.cancel)
        else:
            task.cancel()

    async def _run_leg(
        self, leg: Leg, ref: WorkerRef, body: StartDecode | StartPrefill, deadline_s: float, attempt: int
    ) -> None:
        """Reads one leg to its end and says what became of it."""
        try:
            async with self._host.open_stream(ref, body, deadline_s) as messages:
                await self._read_leg(leg, messages)
            outcome: RequestEvent = LegEnded(leg)
        except Overloaded as error:
            outcome = LegRefused(leg) if self._life.may_be_refused_by(leg) else LegFailed(leg, error)
        except Cancelled as error:  # the worker's own doing: when we give a leg up, nobody listens any more
            why = f"{leg.value} worker {ref.name} gave the request up: {error.message}"
            outcome = LegFailed(leg, WorkerLost(why))
        except InvalidTransition as error:
            outcome = LegFailed(leg, ProtocolError(f"{leg.value} worker {ref.name} is out of step: {error.message}"))
        except KvrelayError as error:
            outcome = LegFailed(leg, error)
        except Exception:
            logger.exception("the %s leg failed", leg.value, extra={"request_id": self.request.request_id})
            outcome = LegFailed(leg, KvrelayError(f"internal error in the {leg.value} leg; see the router's log"))
        if attempt == self._life.attempt and self._life.state is not RequestState.QUEUED:
            self.feed(outcome)  # else the leg was closed when the turn was given back, and this came too late

    async def _read_leg(self, leg: Leg, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            event = self._event_of(leg, message)
            if event is not None:
                self.feed(event)
            if leg not in self._life.open_legs:
                break
        if self._life.state is not RequestState.FINISHED:
            return
        # The stream is complete: let the worker end it, so that it does not count as cancelled there.
        with contextlib.suppress(TimeoutError, KvrelayError):
            async with asyncio.timeout(self._steps.linger_s):
                async for _ in messages:
                    pass

    def _event_of(self, leg: Leg, message: Any) -> RequestEvent | None:
        """What a worker's message means. Raises ProtocolError for one that this leg cannot bring."""
        match leg, message:
            case _, TokenMade(index=index, token=token, finish=finish):
                return TokenReceived(leg, index - self.request.first_index, token, finish)
            case Leg.DECODE, TicketGranted(ticket=ticket):
                of = (ticket.request_id, ticket.ref.attempt)
                if of != (self.request.request_id, self._life.attempt):
                    raise ProtocolError(f"a ticket of another request: {of}, wanted {self._life.story()}")
                return TicketReceived(ticket)
            case Leg.DECODE, HandoffCommitted():
                self.timeline.path, self.timeline.num_kv_bytes = message.path, message.num_bytes
                return KvCommitted()
            case Leg.PREFILL, PrefillDone():
                self.timeline.compute_s, self.timeline.push_s = message.compute_s, message.push_s
                return None
            case _:
                raise ProtocolError(f"the {leg.value} leg brought {type(message).__name__}: {self._life.story()}")
