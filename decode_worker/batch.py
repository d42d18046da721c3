"""The loop of engine steps over all sequences whose KV is here. Carries out what policy says."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial

from decode_worker.policy import next_batch
from decode_worker.sequence import DecodeSequence
from pd_core.errors import Cancelled, EngineError, KvrelayError
from pd_worker.counters import Counters
from pd_worker.engine_thread import EngineThread

_log = logging.getLogger(__name__)


class DecodeBatch:
    """Sequences that run, in order of joining. Belongs to the event loop.

    on_left: called once for each sequence that has joined, when it is over and no engine step uses its blocks
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        counters: Counters,
        max_batch: int,
        on_left: Callable[[DecodeSequence], None],
    ) -> None:
        self._engine_thread = engine_thread
        self._counters = counters
        self._max_batch = max_batch
        self._on_left = on_left
        self._running: list[DecodeSequence] = []
        self._stepping: list[DecodeSequence] = []
        self._is_step_unwanted = threading.Event()
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._running)

    def join(self, sequence: DecodeSequence) -> None:
        """Takes part from the next step on."""
        self._running.append(sequence)
        self._news.set()

    def sweep(self) -> None:
        """To be called when a sequence has ended from outside: it leaves at once, or after the step that it is in.

        A step that nobody wants any more is cancelled.
        """
        for sequence in [sequence for sequence in self._running if sequence.is_over]:
            if sequence not in self._stepping:
                self._running.remove(sequence)
                self._on_left(sequence)
        if self._stepping and all(sequence.is_over for sequence in self._stepping):
            self._is_step_unwanted.set()

    async def run(self) -> None:
        """Steps for ever; ends by cancellation, and then no step is under way."""
        while True:
            self._news.clear()
            self._stepping = next_batch(self._running, self._max_batch)
            if not self._stepping:
                await self._news.wait()
                continue
            self._is_step_unwanted.clear()
            try:
                await self._step()
            finally:
                self._stepping = []
                self.sweep()

    async def _step(self) -> None:
        steps = [sequence.next_step() for sequence in self._stepping]
        try:
            tokens = await self._engine_thread.step(steps, self._is_step_unwanted.is_set)
        except Cancelled:
            return  # nobody wanted it; had somebody, the next step would be the same again
        except EngineError as error:
            if len(self._stepping) == 1:
                self._fail(self._stepping[0], error)
            else:
                await self._step_one_by_one()
            return
        for sequence, token in zip(self._stepping, tokens, strict=True):
            self._take(sequence, token)

    async def _step_one_by_one(self) -> None:
        """Once after a failed step: whose share fails alone too ends; the others' tokens are what they were to be,
        because a sequence's result does not depend on the rest of its step."""
        for sequence in self._stepping:
            if sequence.is_over:
                continue
            try:
                [token] = await self._engine_thread.step([sequence.next_step()], partial(_is_over, sequence))
            except Cancelled:
                continue
            except EngineError as error:
                self._fail(sequence, error)
            else:
                self._take(sequence, token)

    def _take(self, sequence: DecodeSequence, token: int | None) -> None:
        if sequence.is_over:
            return
        if token is None:
            sequence.end(EngineError(f"the engine drew no token for {sequence.request.request_id}"))
            return
        self._counters.add("decode_tokens_total")
        sequence.take(token)

    def _fail(self, sequence: DecodeSequence, error: KvrelayError) -> None:
        _log.error("decode step failed: %s", error, extra={"request_id": sequence.request.request_id})
        sequence.end(error)


def _is_over(sequence: DecodeSequence) -> bool:
    return sequence.is_over
