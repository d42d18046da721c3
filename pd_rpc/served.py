"""One connection of a server: a task for each call, woken by credit, ended by cancellation, deadline or error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Union

import msgspec

from pd_core.errors import Cancelled, DeadlineExceeded, KvrelayError, ProtocolError, WorkerLost
from pd_rpc.connection import ConnectionClosed, ConnectionState, Event, Opened
from pd_rpc.limits import RpcLimits
from pd_rpc.link import Admit, Link
from pd_rpc.server_core import CallCancelled, CallReceived, CreditGranted, ServerConnection
from pd_rpc.wire import PeerIdentity, decode

logger = logging.getLogger(__name__)


class CallContext:
    """What a handler knows about its call.

    peer:       who called
    deadline_s: how long the caller said it would wait, counted from the arrival of the call
    """

    def __init__(self, peer: PeerIdentity, deadline_s: float) -> None:
        self.peer = peer
        self.deadline_s = deadline_s
        self._ends_s = time.monotonic() + deadline_s

    @property
    def remaining_s(self) -> float:
        """How long the caller will still wait; 0 when it does not any more."""
        return max(0.0, self._ends_s - time.monotonic())


Handler = Callable[[Any, CallContext], AsyncIterator[msgspec.Struct]]
"""An async generator function: one item yielded is one answer sent. A unary handler yields once."""


class Service:
    """What all connections of a server share: who answers what, and the tasks that do."""

    def __init__(
        self, identity: PeerIdentity, handlers: Mapping[type[msgspec.Struct], Handler], limits: RpcLimits
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.tasks: set[asyncio.Task[None]] = set()
        self._handlers = handlers
        self._decoder: msgspec.msgpack.Decoder[Any] | None = None
        if handlers:
            self._decoder = msgspec.msgpack.Decoder(Union[tuple(handlers)])  # noqa: UP007 - made at run time

    def decode_body(self, body: msgspec.Raw) -> tuple[Any, Handler]:
        """The call's body and who answers it. Raises ProtocolError for what no handler takes."""
        if self._decoder is None:
            raise ProtocolError(f"{self.identity} answers no calls")
        decoded = decode(self._decoder, body)
        return decoded, self._handlers[type(decoded)]


class _Serving:
    """A call's task, and what it may be waiting for."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.credit_waiter: asyncio.Future[None] | None = None
        self.stopped_by: KvrelayError | None = None

    def stop(self, error: KvrelayError) -> None:
        if self.stopped_by is None and self.task is not None:
            self.stopped_by = error
            self.task.cancel()

    def wake(self) -> None:
        if self.credit_waiter is not None and not self.credit_waiter.done():
            self.credit_waiter.set_result(None)


class ServedConnection:
    """Turns the events of one core into tasks, and what the handlers yield into calls of the core."""

    def __init__(
        self,
        core: ServerConnection,
        service: Service,
        admit: Admit,
        on_lost: Callable[[ServedConnection], None],
    ) -> None:
        self._core = core
        self._service = service
        self._admit_peer = admit
        self._serving: dict[int, _Serving] = {}
        self._loop = asyncio.get_running_loop()
        self.link = Link(core, self._admit, self._on_event, lambda: on_lost(self))
        self.is_admitted = False
        """Whether the peer has proved itself and was let in."""

    def stop_calls(self, reason: str) -> None:
        """Cancels all handlers; their callers hear WorkerLost with this reason."""
        for serving in self._serving.values():
            serving.stop(WorkerLost(reason))

    def _admit(self, peer: PeerIdentity) -> None:
        self._admit_peer(peer)
        self.is_admitted = True

    def _on_event(self, event: Event) -> None:
        match event:
            case CallReceived():
                self._begin(event)
            # A call that was refused on arrival may have a Cancel or Credit behind it in the same bytes.
            case CallCancelled(call_id=call_id) if call_id in self._serving:
                self._serving[call_id].stop(Cancelled("cancelled by the caller"))
            case CreditGranted(call_id=call_id) if call_id in self._serving:
                self._serving[call_id].wake()
            case Opened(peer=peer):
                logger.info("connected: %s at %s", peer, self.link.address)
            case ConnectionClosed(error=error):
                if error is not None:
                    who = self._core.peer or "an unknown peer"
                    logger.warning("connection of %s at %s closed: %s", who, self.link.address, error)
                for serving in self._serving.values():
                    serving.stop(WorkerLost("the caller has left"))

    def _begin(self, call: CallReceived) -> None:
        if self._core.state is not ConnectionState.OPEN:  # closed by what came behind it in the same bytes
            return
        try:
            body, handler = self._service.decode_body(call.body)
        except ProtocolError as error:
            self._core.fail(call.call_id, error)
            self.link.flush_soon()
            return
        serving = _Serving()
        name = f"{self._service.identity.name}:{type(body).__name__}:{call.call_id}"
        serving.task = self._loop.create_task(self._serve(call, serving, body, handler), name=name)
        self._serving[call.call_id] = serving
        self._service.tasks.add(serving.task)
        serving.task.add_done_callback(lambda task: self._forget(call.call_id, task))

    def _forget(self, call_id: int, task: asyncio.Task[None]) -> None:
        self._service.tasks.discard(task)
        serving = self._serving.pop(call_id)
        if task.cancelled():  # cancelled before its first step: the coroutine never ran
            self._finish(call_id, serving.stopped_by or Cancelled("the handler was cancelled"))

    async def _serve(self, call: CallReceived, serving: _Serving, body: Any, handler: Handler) -> None:
        """Runs one handler to its end, whatever the end is."""
        name = type(body).__name__
        try:
            async with asyncio.timeout(call.deadline_s) as timeout:
                await self._answer(call, serving, body, handler)
            self._finish(call.call_id, None)
        except asyncio.CancelledError:
            self._finish(call.call_id, serving.stopped_by or Cancelled("the handler was cancelled"))
        except KvrelayError as error:
            self._finish(call.call_id, serving.stopped_by or error)
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                self._finish(call.call_id, DeadlineExceeded(f"{name} took longer than {call.deadline_s:g} s"))
                return
            logger.exception("the handler of %s failed", name)
            self._finish(
                call.call_id, KvrelayError(f"internal error in {name}; see the log of {self._service.identity}")
            )

    async def _answer(self, call: CallReceived, serving: _Serving, body: Any, handler: Handler) -> None:
        items = handler(body, CallContext(self._core.require_peer(), call.deadline_s))
        async with _closing(items):
            async for item in items:
                await self._wait_until_it_may_send(call.call_id, serving)
                self._core.send_item(call.call_id, item)
                self.link.flush_soon()

    async def _wait_until_it_may_send(self, call_id: int, serving: _Serving) -> None:
        """Waits for credit and for room in the socket. Raises what stopped the call, or DeadlineExceeded."""
        if serving.stopped_by is not None:  # the handler took no notice of its cancellation
            raise serving.stopped_by
        if self._core.credit(call_id) and not self.link.must_drain:
            return
        limit_s = self._service.limits.credit_wait_s
        try:
            async with asyncio.timeout(limit_s) as timeout:
                while not self._core.credit(call_id):
                    serving.credit_waiter = self._loop.create_future()
                    await serving.credit_waiter
                await self.link.drain()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"the caller took no item for {limit_s:g} s") from None

    def _finish(self, call_id: int, error: KvrelayError | None) -> None:
        if self._core.state is not ConnectionState.OPEN:
            return
        if error is None:
            self._core.end(call_id)
        else:
            self._core.fail(call_id, error)
        self.link.flush_soon()


@contextlib.asynccontextmanager
async def _closing(items: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Runs a handler's `finally` blocks before its call is called over."""
    try:
        yield
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
