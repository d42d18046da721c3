"""One leg of a request: one stream of one worker, read to its end; what comes and what becomes of it, as events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

import msgspec

from pd_core.errors import Cancelled, InvalidTransition, KvrelayError, Overloaded, ProtocolError, WorkerLost
from pd_core.messages import (
    HandoffCommitted,
    Preempted,
    PrefillDone,
    PromptAdmitted,
    PromptComputed,
    StartBoth,
    StartDecode,
    StartPrefill,
    TicketGranted,
    TokenMade,
)
from pd_core.request import GenerateRequest
from pd_core.request_life import (
    KvCommitted,
    Leg,
    LegFailed,
    LegRefused,
    PromptTaken,
    RequestEvent,
    RequestLife,
    SequencePreempted,
    TicketReceived,
    TokenReceived,
)
from router.view import WorkerRef

logger = logging.getLogger(__name__)


class WorkerMessages(Protocol):
    """What a worker says on one leg."""

    async def for_each(self, take: Callable[[Any], bool]) -> None:
        """Hands every message to `take` as it comes, until that says False or the stream ends. Raises the errors of
        pd_rpc, and what `take` raises."""
        ...


WorkerStream = AbstractAsyncContextManager[WorkerMessages]
"""A stream of a worker's messages; leaving it cancels what still runs."""

LegCall: TypeAlias = StartDecode | StartBoth | StartPrefill


class PlacedLeg(msgspec.Struct):
    """A leg of the present attempt: which boot of which worker it was placed on; no task before it is opened."""

    ref: WorkerRef
    task: asyncio.Task[None] | None = None


async def read_leg(
    messages: WorkerMessages, take: Callable[[Any], bool], is_finished: Callable[[], bool], linger_s: float
) -> None:
    """Hands every message to `take` until that says that nothing more is wanted.

    When the request has finished well, the worker may still report and end the stream, so that it does not count as
    cancelled there.
    """
    await messages.for_each(take)
    if not is_finished():
        return

    def take_report(message: Any) -> bool:
        take(message)
        return True

    with contextlib.suppress(TimeoutError, KvrelayError):
        async with asyncio.timeout(linger_s):
            await messages.for_each(take_report)


def event_of(leg: Leg, message: Any, request: GenerateRequest, life: RequestLife) -> RequestEvent | None:
    """What a worker's message means; None for one that is a report only.

    Raises ProtocolError for a message that this leg cannot bring.
    """
    if type(message) is TokenMade:  # nearly every message
        return TokenReceived(leg, message.index - request.first_index, message.token, message.finish)
    match leg, message:
        case Leg.DECODE, TicketGranted(ticket=ticket):
            of = (ticket.request_id, ticket.ref.attempt)
            if of != (request.request_id, life.attempt):
                raise ProtocolError(f"a ticket of another request: {of}, wanted {life.story()}")
            return TicketReceived(ticket)
        case Leg.DECODE, PromptAdmitted():
            return PromptTaken()
        case Leg.DECODE, HandoffCommitted():
            return KvCommitted()
        case Leg.DECODE, Preempted(num_made=num_made):
            return SequencePreempted(num_made)
        case (Leg.PREFILL, PrefillDone()) | (Leg.DECODE, PromptComputed()):
            return None
        case _:
            raise ProtocolError(f"the {leg.value} leg brought {type(message).__name__}: {life.story()}")


def event_of_error(leg: Leg, worker: str, error: Exception, life: RequestLife) -> RequestEvent:
    """What it means that a leg ended with this error."""
    match error:
        case Overloaded():
            return LegRefused(leg) if life.may_be_refused_by(leg) else LegFailed(leg, error)
        case Cancelled():  # the worker's own doing: when we give a leg up, nobody listens any more
            return LegFailed(leg, WorkerLost(f"{leg.value} worker {worker} gave the request up: {error.message}"))
        case InvalidTransition():
            return LegFailed(leg, ProtocolError(f"{leg.value} worker {worker} is out of step: {error.message}"))
        case KvrelayError():
            return LegFailed(leg, error)
        case _:
            extra = {"request_id": life.request_id}
            logger.error("the %s leg failed", leg.value, exc_info=error, extra=extra)
            return LegFailed(leg, KvrelayError(f"internal error in the {leg.value} leg; see the router's log"))
