"""RpcStream: the answers to one call, as an async iterator with a bounded queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from pd_core.errors import Cancelled, DeadlineExceeded, KvrelayError, ProtocolError, WorkerLost
from pd_rpc.client_core import ClientConnection
from pd_rpc.connection import ConnectionState
from pd_rpc.link import Link
from pd_rpc.wire import decode


class OpenStreams:
    """The streams of one connection by call id."""

    def __init__(self, core: ClientConnection, link: Link, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self.core = core
        self.link = link
        self.decoder = decoder
        self.by_id: dict[int, RpcStream] = {}
        self.why_closed = "the connection is not open"

    def put(self, items: list[tuple[int, msgspec.Raw]]) -> None:
        """Gives answers to those who wait for them. One stream's consumer may give up another stream."""
        for call_id, body in items:
            stream = self.by_id.get(call_id)
            if stream is not None:
                stream.put(body)

    def fail_all(self, why: str) -> None:
        """The connection is over."""
        self.why_closed = why
        for stream in list(self.by_id.values()):
            stream.finish(WorkerLost(why))


class RpcStream:
    """One call and its answers. Made by `RpcClient.stream`.

    The call is sent by `async with` or by the first `anext`; its deadline runs from the making of the stream. Iteration
    gives the items in order and ends, or raises what the other side failed with, DeadlineExceeded, WorkerLost,
    or Cancelled after `cancel`. Items that came before an error are given first. Use it as
    `async with client.stream(...) as items:`, so that leaving the block early cancels the call. One consumer at a time.
    For streams of many small items there is `for_each`, which wakes no task for an item.

    credit:    items that may be on the way or in the queue
    top_up_at: items to be taken before the server is granted as many again
    """

    def __init__(
        self, streams: OpenStreams, body: msgspec.Struct, deadline_s: float, *, credit: int, top_up_at: int
    ) -> None:
        self._streams = streams
        self._body = body
        self._name = type(body).__name__
        self._deadline_s = deadline_s
        self._credit = credit
        self._top_up_at = top_up_at
        self._loop = asyncio.get_running_loop()
        self._ends_s = self._loop.time() + deadline_s
        self._call_id: int | None = None
        self._items: deque[msgspec.Raw] = deque()
        self._num_taken = 0
        self._is_over = False
        self._error: KvrelayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[Any], bool] | None = None
        self._take_error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> RpcStream:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cancel()

    def __aiter__(self) -> RpcStream:
        return self

    async def __anext__(self) -> Any:
        await self._begin()
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            await self._wait()
        return self._read(self._items.popleft())

    async def for_each(self, take: Callable[[Any], bool]) -> None:
        """Hands every item to `take` at the moment at which it comes, until that says False or the call is over.

        `take` runs inside the connection's callback, so it must return at once; after this has ended, also by
        cancellation, it is not called any more. Raises what iteration raises, and what `take` raises.
        """
        await self._begin()
        self._take = take
        try:
            while self._hand_over_all():
                if self._error is not None:
                    raise self._error
                if self._is_over:
                    return
                await self._wait()
            if self._take_error is not None:
                raise self._take_error
        finally:
            self._take = self._take_error = None

    async def cancel(self) -> None:
        """Tells the server that nobody waits any more; does nothing when the call is over. Does not block."""
        self._give_up(Cancelled(f"{self._name} was cancelled here"))
        self._items.clear()

    async def aclose(self) -> None:
        """The same as `cancel`."""
        await self.cancel()

    # called for events of the connection

    def put(self, body: msgspec.Raw) -> None:
        """An item has come; there are never more than the credit."""
        if self._take is None:
            self._items.append(body)
        elif self._hand_over(body):  # nothing lies here: what came before was handed over
            return
        self._wake()

    def finish(self, error: KvrelayError | None) -> None:
        """The call is over; nothing will come any more."""
        self._is_over = True
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        if self._call_id is not None:
            self._streams.by_id.pop(self._call_id, None)
        self._wake()

    # inside

    async def _begin(self) -> None:
        """Sends the call, once. Raises DeadlineExceeded or WorkerLost when it is too late for that."""
        if self._call_id is not None or self._is_over:
            return
        link, core = self._streams.link, self._streams.core
        if link.must_drain:
            try:
                async with asyncio.timeout_at(self._ends_s):
                    await link.drain()
            except TimeoutError:
                raise self._too_late() from None
        if core.state is not ConnectionState.OPEN:
            raise WorkerLost(self._streams.why_closed)
        left_s = self._ends_s - self._loop.time()
        if left_s <= 0:
            raise self._too_late()
        self._call_id = core.open_call(self._body, left_s, self._credit)
        self._streams.by_id[self._call_id] = self
        self._timer = self._loop.call_at(self._ends_s, lambda: self._give_up(self._too_late()))
        link.flush_soon()

    def _read(self, body: msgspec.Raw) -> Any:
        self._num_taken += 1
        if self._num_taken >= self._top_up_at:
            self._top_up()
        try:
            return decode(self._streams.decoder, body)
        except ProtocolError as error:
            self._give_up(Cancelled(f"{self._name} was cancelled here"))
            self._items.clear()
            raise ProtocolError(f"answer to {self._name}: {error}") from error

    def _hand_over_all(self) -> bool:
        """Whether `take` still wants more."""
        while self._items and self._take is not None:
            self._hand_over(self._items.popleft())
        return self._take is not None

    def _hand_over(self, body: msgspec.Raw) -> bool:
        """Whether `take` wants more; what it raises is kept for who waits in `for_each`."""
        assert self._take is not None  # noqa: S101 - narrows: who calls has looked
        try:
            if self._take(self._read(body)):
                return True
        except Exception as error:
            self._take_error = error
        self._take = None
        return False

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two consumers wait on one stream")
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _top_up(self) -> None:
        self._num_taken, num_items = 0, self._num_taken
        if self._call_id is not None and self._streams.core.is_open_call(self._call_id):
            self._streams.core.grant(self._call_id, num_items)
            self._streams.link.flush_soon()

    def _give_up(self, error: KvrelayError) -> None:
        if self._is_over:
            return
        if self._call_id is not None and self._streams.core.is_open_call(self._call_id):
            self._streams.core.cancel(self._call_id)
            self._streams.link.flush_soon()
        self.finish(error)

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._name} to {self._streams.core.peer} took longer than {self._deadline_s:g} s")
