"""Life of one request in the router, over its two legs: the decode stream and the prefill stream.

    QUEUED -> RESERVING -> PREFILLING -> DECODING -> FINISHED
      ^           |            |            |
      `- refused -+- refused --|            |
                  `------------+------------+------> FAILED, CANCELLED

QUEUED:     waits for a turn; nothing is reserved, no leg is open
RESERVING:  the decode leg is open and has been asked for a ticket, or to take the prompt too
PREFILLING: the prompt is being computed: by the prefill leg, which has the ticket, or by the decode leg alone;
            the first token may come from now on
DECODING:   the first token went to the client; more come from decode once it has all KV

A placement without a prefill worker has one leg: the decode worker does both phases, and there is no ticket and nothing
to commit. With two legs both bring the first token, and the copies must be equal; each leg's own tokens come in order
and without a gap, so no later index can come twice, and every index is delivered once, in order. A sequence that was
preempted goes on by itself: for the request nothing changes.

When the stream ends, in whatever way, legs that are still open are closed. Events from a leg that was closed already
are ignored: they were under way. A worker of either role that has no room says so before it has done anything: then the
request gives up its ticket, if it has one, and waits for another turn. An event that fits nowhere raises
InvalidTransition and changes nothing.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from pd_core.errors import InvalidTransition, KvrelayError, ProtocolError, TokenMismatch
from pd_core.request import FinishReason
from pd_core.ticket import Ticket


class RequestState(enum.Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Leg(enum.Enum):
    DECODE = "decode"
    PREFILL = "prefill"

    __hash__ = object.__hash__  # enum's own is a Python function; a leg is looked up several times for every token


class Placed(msgspec.Struct, frozen=True):
    """The policy has chosen these two workers; without a prefill worker, decode computes the prompt itself."""

    prefill: str | None
    decode: str


class TicketReceived(msgspec.Struct, frozen=True):
    """The decode worker has reserved the blocks."""

    ticket: Ticket


class PromptTaken(msgspec.Struct, frozen=True):
    """The decode worker has room for the prompt and computes it."""


class LegRefused(msgspec.Struct, frozen=True):
    """The worker of this leg has no room now; it has computed nothing."""

    leg: Leg


class TokenReceived(msgspec.Struct, frozen=True):
    """A leg brought token `index` of this attempt's stream (0 = the first). Prefill has no other than the first."""

    leg: Leg
    index: int
    token: int
    finish: FinishReason | None


class KvCommitted(msgspec.Struct, frozen=True):
    """Decode owns the KV; whatever happens to the prefill leg from now on does not matter."""


class SequencePreempted(msgspec.Struct, frozen=True):
    """Decode took the sequence's blocks for older ones; it is computed again and goes on. num_made: tokens so far."""

    num_made: int


class LegEnded(msgspec.Struct, frozen=True):
    """A leg came to its end without an error."""

    leg: Leg


class LegFailed(msgspec.Struct, frozen=True):
    leg: Leg
    error: KvrelayError


class ClientLeft(msgspec.Struct, frozen=True):
    """Nobody reads the tokens any more."""


class AnswerComplete(msgspec.Struct, frozen=True):
    """The client has all that it asked for, a stop string came: what workers would still make is not wanted."""


class TimeRanOut(msgspec.Struct, frozen=True):
    """The request's deadline, or that of the step it is in, has passed."""

    error: KvrelayError


RequestEvent: TypeAlias = (
    Placed
    | TicketReceived
    | PromptTaken
    | LegRefused
    | TokenReceived
    | KvCommitted
    | SequencePreempted
    | LegEnded
    | LegFailed
    | ClientLeft
    | AnswerComplete
    | TimeRanOut
)


class OpenDecode(msgspec.Struct, frozen=True):
    """Ask for a ticket."""

    decode: str


class OpenBoth(msgspec.Struct, frozen=True):
    """Ask for prompt and answer from one worker."""

    decode: str


class OpenPrefill(msgspec.Struct, frozen=True):
    prefill: str
    ticket: Ticket


class CloseLeg(msgspec.Struct, frozen=True):
    leg: Leg


class Deliver(msgspec.Struct, frozen=True):
    """Give this token to the client; it is the next in order."""

    index: int
    token: int
    finish: FinishReason | None


class Fail(msgspec.Struct, frozen=True):
    """Tell the client what happened; no token comes after this."""

    error: KvrelayError


RequestCommand: TypeAlias = OpenDecode | OpenBoth | OpenPrefill | CloseLeg | Deliver | Fail


class RequestLife(msgspec.Struct, frozen=True):
    """A request and how far it has come.

    attempt:     count of placements; part of every ticket
    prefill:     None where decode computes the prompt, and before a placement
    open_legs:   legs that hold something on a worker
    num_tokens:  delivered to the client
    first_token: what every copy of token 0 must be; None before it has come
    num_of_prefill, num_of_decode: tokens that this leg has brought
    is_committed: decode owns the KV of this attempt
    num_preemptions: of this attempt
    """

    request_id: str
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    prefill: str | None = None
    decode: str | None = None
    open_legs: frozenset[Leg] = frozenset()
    num_tokens: int = 0
    first_token: int | None = None
    num_of_prefill: int = 0
    num_of_decode: int = 0
    is_committed: bool = False
    num_preemptions: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def has_handed_off(self) -> bool:
        """The prefill leg may end: its token was delivered, or decode has it with the KV."""
        return self.num_tokens > 0 or self.is_committed

    @property
    def has_sequence(self) -> bool:
        """Decode has a sequence of ours, which it may preempt: one whose KV it owns or makes itself."""
        is_under_way = self.state in (RequestState.PREFILLING, RequestState.DECODING)
        return is_under_way and (self.prefill is None or self.is_committed)

    def may_be_refused_by(self, leg: Leg) -> bool:
        """The leg was asked to begin, and nothing that has come proves that it did."""
        match self.state, leg:
            case RequestState.RESERVING, Leg.DECODE:
                return True
            case RequestState.PREFILLING, Leg.PREFILL:
                return leg in self.open_legs and not self.is_committed
            case _:
                return False

    def story(self) -> str:
        legs = "+".join(sorted(leg.value for leg in self.open_legs)) or "none"
        return (
            f"request {self.request_id} {self.state.value}, attempt {self.attempt}, "
            f"{self.num_tokens} tokens, open legs: {legs}"
        )

    def validate(self) -> None:
        """Raises InvalidTransition when the fields contradict each other."""
        quiet = self.is_over or self.state is RequestState.QUEUED
        if quiet and self.open_legs:
            raise InvalidTransition(f"a leg was left open: {self.story()}")
        if not quiet and Leg.DECODE not in self.open_legs:
            raise InvalidTransition(f"the decode leg is lost: {self.story()}")
        if self.prefill is None and Leg.PREFILL in self.open_legs:
            raise InvalidTransition(f"a prefill leg without a worker: {self.story()}")
        if self.state is RequestState.DECODING and self.num_tokens == 0:
            raise InvalidTransition(f"decoding without a first token: {self.story()}")
        if self.num_tokens != max(self.num_of_prefill, self.num_of_decode) or self.num_of_prefill > 1:
            raise InvalidTransition(f"tokens miscounted: {self.story()}")
        if (self.first_token is None) != (self.num_tokens == 0):
            raise InvalidTransition(f"the first token is not what was delivered: {self.story()}")


_replace = msgspec.structs.replace
_OVER = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)
_DECODING, _OF_DECODE = RequestState.DECODING, Leg.DECODE  # to look one up in its class takes as long as `_replace`


def step(life: RequestLife, event: RequestEvent) -> tuple[RequestLife, list[RequestCommand]]:
    """Next state and what to do about it. Raises InvalidTransition: a fault of ours."""
    match life.state, event:
        case ((RequestState.DECODING | RequestState.PREFILLING), TokenReceived()):  # first: nearly every event
            return _token(life, event)
        case ((RequestState.FINISHED | RequestState.FAILED | RequestState.CANCELLED), _) if not isinstance(
            event, Placed
        ):
            return life, []
        case RequestState.QUEUED, Placed(prefill=prefill, decode=decode):
            placed = _replace(
                life,
                state=RequestState.RESERVING,
                attempt=life.attempt + 1,
                prefill=prefill,
                decode=decode,
                open_legs=frozenset({Leg.DECODE}),
                is_committed=False,
                num_preemptions=0,
            )
            return placed, [OpenBoth(decode) if prefill is None else OpenDecode(decode)]
        case RequestState.RESERVING, TicketReceived(ticket=ticket) if life.prefill is not None:
            legs = frozenset({Leg.DECODE, Leg.PREFILL})
            return _replace(life, state=RequestState.PREFILLING, open_legs=legs), [OpenPrefill(life.prefill, ticket)]
        case RequestState.RESERVING, PromptTaken() if life.prefill is None:
            return _replace(life, state=RequestState.PREFILLING), []
        case _, LegRefused(leg=leg) if life.may_be_refused_by(leg):
            again, close = _end(life, RequestState.QUEUED, [])
            return _replace(again, prefill=None, decode=None), close
        case ((RequestState.PREFILLING | RequestState.DECODING), KvCommitted()) if (
            life.prefill is not None and not life.is_committed
        ):
            return _replace(life, is_committed=True), []
        case _, SequencePreempted(num_made=num_made) if life.has_sequence:
            if num_made != life.num_of_decode:
                return _fail(life, ProtocolError(f"preempted after {num_made} tokens: {life.story()}"))
            return _replace(life, num_preemptions=life.num_preemptions + 1), []
        case (
            (RequestState.RESERVING | RequestState.PREFILLING | RequestState.DECODING),
            (LegEnded() | LegFailed()),
        ):
            return _leg_over(life, event)
        case _, TimeRanOut(error=error):
            return _fail(life, error)
        case _, ClientLeft():
            return _end(life, RequestState.CANCELLED, [])
        case RequestState.DECODING, AnswerComplete():
            return _end(life, RequestState.FINISHED, [])
        case _:
            raise InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def usual_token(life: RequestLife, leg: Leg, index: int, finish: FinishReason | None) -> RequestLife | None:
    """What `step` makes of a usual token, which is to be delivered: one of decode, neither the first nor the last.

    None for any other. Nearly all that ever comes is such a token, and this is the table's row for it without an event
    and a command.
    """
    is_usual = life.state is _DECODING and leg is _OF_DECODE and finish is None
    if not (is_usual and index == life.num_of_decode == life.num_tokens):
        return None
    return _replace(life, num_tokens=index + 1, num_of_decode=index + 1)


def _token(life: RequestLife, event: TokenReceived) -> tuple[RequestLife, list[RequestCommand]]:
    if event.leg not in life.open_legs:
        return life, []
    is_of_prefill = event.leg is Leg.PREFILL
    num_before = life.num_of_prefill if is_of_prefill else life.num_of_decode
    if event.index != num_before or (is_of_prefill and num_before > 0):
        return _fail(life, ProtocolError(f"token {event.index} of {event.leg.value} is out of turn: {life.story()}"))
    num_of_prefill, num_of_decode = life.num_of_prefill + is_of_prefill, life.num_of_decode + (not is_of_prefill)
    if event.index < life.num_tokens:
        if event.token != life.first_token:
            ours, theirs = life.first_token, event.token
            return _fail(life, TokenMismatch(f"token {event.index} is {ours} and {theirs}: {life.story()}"))
        return _replace(life, num_of_prefill=num_of_prefill, num_of_decode=num_of_decode), []
    longer = _replace(
        life,
        state=RequestState.DECODING,
        num_tokens=life.num_tokens + 1,
        first_token=event.token if life.first_token is None else life.first_token,
        num_of_prefill=num_of_prefill,
        num_of_decode=num_of_decode,
    )
    deliver = Deliver(event.index, event.token, event.finish)
    if event.finish is None:
        return longer, [deliver]
    return _end(longer, RequestState.FINISHED, [deliver])


def _leg_over(life: RequestLife, event: LegEnded | LegFailed) -> tuple[RequestLife, list[RequestCommand]]:
    if event.leg is Leg.PREFILL and (life.has_handed_off if isinstance(event, LegEnded) else life.is_committed):
        return _replace(life, open_legs=life.open_legs - {Leg.PREFILL}), []
    if isinstance(event, LegEnded):
        return _fail(life, ProtocolError(f"the {event.leg.value} leg ended early: {life.story()}"))
    return _fail(life, event.error) if event.leg in life.open_legs else (life, [])


def _fail(life: RequestLife, error: KvrelayError) -> tuple[RequestLife, list[RequestCommand]]:
    return _end(life, RequestState.FAILED, [Fail(error)])


def _end(
    life: RequestLife, state: RequestState, commands: list[RequestCommand]
) -> tuple[RequestLife, list[RequestCommand]]:
    close = [CloseLeg(leg) for leg in (Leg.PREFILL, Leg.DECODE) if leg in life.open_legs]
    return _replace(life, state=state, open_legs=frozenset()), [*commands, *close]
