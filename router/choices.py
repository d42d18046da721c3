"""The choices of one request: each a run of its own on the workers, read together."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from pd_core.errors import Cancelled
from pd_core.request import GenerateRequest
from router.request_run import RequestRun, TokenEvent
from router.serving import Serving


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


class Choices:
    """Runs that are read as one stream of (choice, events). `leave` comes in the end, whatever happens."""

    def __init__(self, runs: Sequence[RequestRun]) -> None:
        self.runs = runs
        self._readers: list[asyncio.Task[None]] = []
        self._ready: list[tuple[int, list[TokenEvent]]] = []
        self._news = asyncio.Event()
        self._failure: BaseException | None = None

    async def next_events(self) -> list[tuple[int, list[TokenEvent]]]:
        """What has come since the last call, at least something of one choice; a choice's last event says so.

        Not to be called when all have ended. Raises what the first choice failed with, and Cancelled after `leave`.
        """
        if len(self.runs) == 1:
            return [(0, await self.runs[0].next_events())]
        if not self._readers:
            loop = asyncio.get_running_loop()
            self._readers = [loop.create_task(self._read(*numbered)) for numbered in enumerate(self.runs)]
            for reader in self._readers:
                reader.add_done_callback(self._reader_ended)
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        ready, self._ready = self._ready, []
        return ready

    def complete(self, choice: int) -> None:
        """Its text is complete; what its workers would still make is not wanted."""
        self.runs[choice].complete()

    def leave(self) -> None:
        """Nobody reads any more: ends whatever has not ended."""
        for run in self.runs:
            run.leave()
        for reader in self._readers:
            reader.cancel()
        self._fail(Cancelled(f"the client has left {self.runs[0].request.request_id} and its other choices"))

    async def _read(self, choice: int, run: RequestRun) -> None:
        """Takes the choice's tokens over; what lies here unread is bounded as it is in the run."""
        while events := await run.next_events():
            self._ready.append((choice, events))
            self._news.set()

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._news.set()


def open_choices(serving: Serving, requests: Sequence[GenerateRequest], arrived_s: float) -> Choices:
    """Begins to serve all of them, or none: raises what `Serving.open` raises for the first that is refused."""
    runs: list[RequestRun] = []
    try:
        for request in requests:
            runs.append(serving.open(request, arrived_s))
    except BaseException:
        for run in runs:
            run.leave()
        raise
    return Choices(runs)
