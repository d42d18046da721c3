"""The choices of one request: each a run of its own on the workers, read together."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial

from pd_core.errors import KvrelayError
from pd_core.request import GenerateRequest
from router.request_run import RequestRun
from router.rounds import Rounds
from router.serving import Serving
from router.unread import TokenEvent


def choice_seed(seed: int, choice: int) -> int:
    """The seed, 0 .. 2**63 - 1, of one of a prompt's choices.

    Choice 0 has the request's own: with n = 1 and with more it is the same answer. Choice k > 0 has the first 63 bits
    of blake2b over "kvrelay choice", seed and k, both as 8 bytes, big-endian. This never changes: who gives a seed gets
    the same answers from every version.
    """
    if choice == 0:
        return seed
    said = b"kvrelay choice" + seed.to_bytes(8, "big") + choice.to_bytes(8, "big")
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big") >> 1


Take = Callable[[Sequence[tuple[int, list[TokenEvent]]]], bool]
"""Takes (choice, its events) pairs; whether it wants more now."""


class Choices:
    """Runs that are read as one stream of (choice, events). `leave` comes in the end, whatever happens.

    What nobody has taken yet lies in the runs, and not here. rounds: when what has come is handed on
    """

    def __init__(self, runs: Sequence[RequestRun], rounds: Rounds) -> None:
        self.runs = runs
        self._rounds = rounds
        self._with_news: dict[int, None] = {}  # in the order in which it came
        self._reader: tuple[Take, asyncio.Future[None]] | None = None
        self._failure: KvrelayError | None = None
        for choice, run in enumerate(runs):
            run.watch(partial(self._came, choice))
            self._came(choice)

    async def for_each(self, take: Take) -> None:
        """Hands what comes to `take`, until that says False: at first what lies here, later whatever a round brings.

        `take` is called outside this task, so that none has to be woken for a token, and it must return at once. A
        choice's last event says that it is. Not to be called when all choices have ended. Raises what the first choice
        failed with, after what had come before; Cancelled after `leave`; and what `take` raises.
        """
        if not self._hand_over(take):
            return
        self._reader = take, asyncio.get_running_loop().create_future()
        try:
            await self._reader[1]
        finally:
            self._reader = None

    def complete(self, choice: int) -> None:
        """Its text is complete; what its workers would still make is not wanted."""
        self.runs[choice].complete()

    def leave(self) -> None:
        """Nobody reads any more: ends whatever has not ended."""
        for run in self.runs:
            run.leave()
            run.watch(lambda: None)  # it may be kept longer than its reader

    def _came(self, choice: int) -> None:
        if not self._with_news and self._reader is not None:
            self._rounds.soon(self._hand_over_to_reader)
        self._with_news[choice] = None

    def _hand_over_to_reader(self) -> None:
        if self._reader is None or self._reader[1].done():
            return
        take, waiter = self._reader
        try:
            if self._hand_over(take):
                return
        except Exception as error:
            waiter.set_exception(error)
        else:
            waiter.set_result(None)

    def _hand_over(self, take: Take) -> bool:
        while self._with_news:
            taken = self._collect()
            if taken and not take(taken):
                return False
        if self._failure is not None:
            raise self._failure
        return True

    def _collect(self) -> list[tuple[int, list[TokenEvent]]]:
        choices, self._with_news = self._with_news, {}
        taken = []
        for choice in choices:
            run = self.runs[choice]
            try:
                events = run.take_events()
            except KvrelayError as error:
                self._failure = self._failure or error
                continue
            if events:
                taken.append((choice, events))
                if run.timeline.ended_s is not None:
                    self._with_news[choice] = None  # behind its last tokens may be an error
        return taken


def open_choices(serving: Serving, requests: Sequence[GenerateRequest], arrived_s: float) -> Choices:
    """Begins to serve all of them, or none: raises what `Serving.open` raises for the first that is refused."""
    runs: list[RequestRun] = []
    try:
        for request in requests:
            runs.append(serving.open(request, arrived_s))
    except BaseException:
        for run in runs:
            serving.withdraw(run)
        raise
    return Choices(runs, serving.rounds)
