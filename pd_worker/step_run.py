"""One engine step for several requests: nobody fails for another, and a step ends early when nobody wants it.

parts ---> one step ---> a token for each
              `- fails -> each part alone, once: who fails alone too has failed; the others' results are what they
                          were to be, because a sequence's result does not depend on the rest of its step
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, KvrelayError
from pd_worker.engine_thread import EngineThread


class StepPart(msgspec.Struct, frozen=True):
    """What one request has the engine do.

    is_over: whether nobody wants it any more
    """

    step: SequenceStep
    is_over: Callable[[], bool]


class PartDone(msgspec.Struct, frozen=True):
    """The part's KV is made. token: None where none was to be drawn; began_s, ended_s: the engine's step, loop time"""

    token: int | None
    began_s: float
    ended_s: float


PartOutcome: TypeAlias = PartDone | KvrelayError | None
"""None: it was not run, because nobody wanted it any more."""


class StepRunner:
    """One step at a time. Belongs to the event loop."""

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread
        self._loop = asyncio.get_running_loop()
        self._parts: Sequence[StepPart] = ()
        self._is_unwanted = False  # set on the loop, read by the engine's thread

    def reconsider(self) -> None:
        """To be called when a request has ended from outside: a step that nobody wants any more is given up."""
        if self._parts and all(part.is_over() for part in self._parts):
            self._is_unwanted = True

    async def run(self, parts: Sequence[StepPart]) -> list[PartOutcome]:
        """What became of each part. When it returns or raises, also by cancellation, the engine has left."""
        self._parts = parts
        self._is_unwanted = False
        try:
            return await self._together(parts)
        finally:
            self._parts = ()

    async def _together(self, parts: Sequence[StepPart]) -> list[PartOutcome]:
        try:
            return [*await self._step(parts, lambda: self._is_unwanted)]
        except Cancelled:
            return [None] * len(parts)
        except KvrelayError as error:
            if len(parts) == 1:
                return [error]
        return [await self._alone(part) for part in parts]

    async def _alone(self, part: StepPart) -> PartOutcome:
        if part.is_over():
            return None
        try:
            [done] = await self._step([part], part.is_over)
        except Cancelled:
            return None
        except KvrelayError as error:
            return error
        return done

    async def _step(self, parts: Sequence[StepPart], is_cancelled: Callable[[], bool]) -> list[PartDone]:
        began_s = self._loop.time()
        tokens = await self._engine_thread.step([part.step for part in parts], is_cancelled)
        ended_s = self._loop.time()
        return [PartDone(token, began_s, ended_s) for _, token in zip(parts, tokens, strict=True)]
