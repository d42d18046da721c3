"""Life of one request in the router, over its two legs: the decode stream and the prefill stream.

    QUEUED -> RESERVING -> PREFILLING -> DECODING -> FINISHED
      ^           |            |            |
      `- refused -+- refused --|            |
                  `------------+------------+------> FAILED, CANCELLED

QUEUED:     waits for a turn; nothing is reserved, no leg is open
RESERVING:  the decode leg is open and has been asked for a ticket
PREFILLING: the prefill leg has the ticket; the first token may come from now on
DECODING:   the first token went to the client; more come from decode once the handoff is committed

Both legs bring tokens, each with its index; every index is delivered once, in order, and two copies must be equal.
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


class Placed(msgspec.Struct, frozen=True):
    """The policy has chosen these two workers."""

    prefill: str
    decode: str


class TicketReceived(msgspec.Struct, frozen=True):
    """The decode worker has reserved the blocks."""

    ticket: Ticket


class LegRefused(msgspec.Struct, frozen=True):
    """The worker of this leg has no room now; it has computed nothing."""

    leg: Leg


class TokenReceived(msgspec.Struct, frozen=True):
    """A leg brought token `index` of this attempt's stream (0 = the first)."""

    leg: Leg
    index: int
    token: int
    finish: FinishReason | None


class KvCommitted(msgspec.Struct, frozen=True):
    """Decode owns the KV; whatever happens to the prefill leg from now on does not matter."""


class LegEnded(msgspec.Struct, frozen=True):
    """A leg came to its end without an error."""

    leg: Leg


class LegFailed(msgspec.Struct, frozen=True):
    leg: Leg
    error: KvrelayError


class ClientLeft(msgspec.Struct, frozen=True):
    """Nobody reads the tokens any more."""


class TimeRanOut(msgspec.Struct, frozen=True):
    """The request's deadline, or that of the step it is in, has passed."""

    error: KvrelayError


RequestEvent: TypeAlias = (
    Placed | TicketReceived | LegRefused | TokenReceived | KvCommitted | LegEnded | LegFailed | ClientLeft | TimeRanOut
)


class OpenDecode(msgspec.Struct, frozen=True):
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


RequestCommand: TypeAlias = OpenDecode | OpenPrefill | CloseLeg | Deliver | Fail


class RequestLife(msgspec.Struct, frozen=True):
    """A request and how far it has come.

    attempt:   count of placements; part of every ticket
    open_legs: legs that hold something on a worker
    is_committed: decode owns the KV of this attempt
    """

    request_id: str
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    prefill: str | None = None
    decode: str | None = None
    open_legs: frozenset[Leg] = frozenset()
    tokens: tuple[int, ...] = ()
    is_committed: bool = False

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def has_handed_off(self) -> bool:
        """The prefill leg may end: its token was delivered, or decode has it with the KV."""
        return bool(self.tokens) or self.is_committed

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
            f"{len(self.tokens)} tokens, open legs: {legs}"
        )

    def validate(self) -> None:
        """Raises InvalidTransition when the fields contradict each other."""
        quiet = self.is_over or self.state is RequestState.QUEUED
        if quiet and self.open_legs:
            raise InvalidTransition(f"a leg was left open: {self.story()}")
        if not quiet and Leg.DECODE not in self.open_legs:
            raise InvalidTransition(f"the decode leg is lost: {self.story()}")
        if self.state is RequestState.DECODING and not self.tokens:
            raise InvalidTransition(f"decoding without a first token: {self.story()}")


_OVER = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


def step(life: RequestLife, event: RequestEvent) -> tuple[RequestLife, list[RequestCommand]]:
    """Next state and what to do about it. Raises InvalidTransition: a fault of ours."""
    match life.state, event:
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
            )
            return placed, [OpenDecode(decode)]
        case RequestState.RESERVING, TicketReceived(ticket=ticket) if life.prefill is not None:
            legs = frozenset({Leg.DECODE, Leg.PREFILL})
            return _replace(life, state=RequestState.PREFILLING, open_legs=legs), [OpenPrefill(life.prefill, ticket)]
        case _, LegRefused(leg=leg) if life.may_be_refused_by(leg):
            again, close = _end(life, RequestState.QUEUED, [])
            return _replace(again, prefill=None, decode=None), close
        case ((RequestState.PREFILLING | RequestState.DECODING), TokenReceived()):
            return _token(life, event)
        case ((RequestState.PREFILLING | RequestState.DECODING), KvCommitted()) if not life.is_committed:
            return _replace(life, is_committed=True), []
        case ((RequestState.PREFILLING | RequestState.DECODING), LegEnded(leg=Leg.PREFILL)) if life.has_handed_off:
            return _replace(life, open_legs=life.open_legs - {Leg.PREFILL}), []
        case ((RequestState.PREFILLING | RequestState.DECODING), LegFailed(leg=Leg.PREFILL)) if life.is_committed:
            return _replace(life, open_legs=life.open_legs - {Leg.PREFILL}), []
        case ((RequestState.RESERVING | RequestState.PREFILLING | RequestState.DECODING), LegEnded(leg=leg)):
            return _fail(life, ProtocolError(f"the {leg.value} leg ended early: {life.story()}"))
        case (
            (RequestState.RESERVING | RequestState.PREFILLING | RequestState.DECODING),
            LegFailed(leg=leg, error=error),
        ):
            return _fail(life, error) if leg in life.open_legs else (life, [])
        case _, TimeRanOut(error=error):
            return _fail(life, error)
        case _, ClientLeft():
            return _end(life, RequestState.CANCELLED, [])
        case _:
            raise InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def _token(life: RequestLife, event: TokenReceived) -> tuple[RequestLife, list[RequestCommand]]:
    if event.leg not in life.open_legs:
        return life, []
    if event.index < len(life.tokens):
        if life.tokens[event.index] != event.token:
            ours, theirs = life.tokens[event.index], event.token
            return _fail(life, TokenMismatch(f"token {event.index} is {ours} and {theirs}: {life.story()}"))
        return life, []
    if event.index > len(life.tokens):
        return _fail(life, ProtocolError(f"token {event.index} came before its turn: {life.story()}"))
    longer = _replace(life, state=RequestState.DECODING, tokens=(*life.tokens, event.token))
    deliver = Deliver(event.index, event.token, event.finish)
    if event.finish is None:
        return longer, [deliver]
    return _end(longer, RequestState.FINISHED, [deliver])


def _fail(life: RequestLife, error: KvrelayError) -> tuple[RequestLife, list[RequestCommand]]:
    return _end(life, RequestState.FAILED, [Fail(error)])


def _end(
    life: RequestLife, state: RequestState, commands: list[RequestCommand]
) -> tuple[RequestLife, list[RequestCommand]]:
    close = [CloseLeg(leg) for leg in (Leg.PREFILL, Leg.DECODE) if leg in life.open_legs]
    return _replace(life, state=state, open_legs=frozenset()), [*commands, *close]


def _replace(life: RequestLife, **changes: object) -> RequestLife:
    return msgspec.structs.replace(life, **changes)
