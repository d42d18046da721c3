"""Calls to Ray actors, each with a deadline: without one, an actor that cannot be placed is waited for for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

from pd_core.errors import DeadlineExceeded, KvrelayError


async def ask(ref: Any, deadline_s: float, what: str) -> Any:
    """The answer to an actor call.

    Raises DeadlineExceeded naming `what`, the KvrelayError that the actor raised, RayTaskError for any other
    exception in it, or RayActorError when it is dead.
    """
    try:
        return await asyncio.wait_for(asyncio.shield(future_of(ref)), deadline_s)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} gave no answer within {deadline_s:g} s") from error
    except RayTaskError as error:
        if isinstance(error.cause, KvrelayError):
            raise error.cause from error
        raise


def future_of(ref: Any) -> asyncio.Future[Any]:
    """The answer as a future of the running loop; one that is never awaited is no fault."""
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    future.add_done_callback(_retrieve)
    return future


def sentence_of(error: BaseException) -> str:
    """What an exception says, in one line; Ray's go on for pages."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A constructor's own exception is the last line of the traceback that Ray sends along.
    return lines[-1] if isinstance(error, ActorDiedError) and "creation task" in lines[0] else lines[0]


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
