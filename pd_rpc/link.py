"""asyncio shell of a connection core: carries bytes, keeps two timers, decides nothing.

Why an asyncio.Protocol and not StreamReader/StreamWriter: bytes go from the socket straight into the core, without a
second buffer and without a task that waits for them, which halves the latency of a call; and `pause_writing` tells
exactly when to stop. What is kept is bounded on both ways: in, by one unfinished frame and by the credit of the calls;
out, by `write_high_water_bytes`, at which everybody who has something long to say waits in `drain`, and by
`max_unsent_bytes`, at which the peer is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from pd_core.errors import KvrelayError, WorkerLost
from pd_rpc.address import format_address
from pd_rpc.connection import Connection, ConnectionClosed, ConnectionState, Event, Opened, PeerProved
from pd_rpc.wire import PeerIdentity

logger = logging.getLogger(__name__)

Admit = Callable[[PeerIdentity], None]
"""Looks at a peer that has proved itself; refuses it by raising a KvrelayError."""

_FLUSH_NOW_BYTES = 64 * 1024
_OF_CONNECTION = frozenset({PeerProved, ConnectionClosed, Opened})
"""Events that are not about one call, and few."""


class Link(asyncio.Protocol):
    """One socket and its core.

    admit:    answers PeerProved
    on_event: gets every other event
    on_lost:  the socket is closed, after the last event
    """

    def __init__(
        self,
        core: Connection,
        admit: Admit,
        on_event: Callable[[Event], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._core = core
        self._admit = admit
        self._on_event = on_event
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._drain_waiters: set[asyncio.Future[None]] = set()
        self._flush_handle: asyncio.Handle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()
        self.address = "not connected"
        """host:port of the other side."""

    # what the owner uses

    def flush_soon(self) -> None:
        """Sends what the core has queued, together with all that is queued until the loop comes round."""
        if self._core.num_unsent_bytes >= _FLUSH_NOW_BYTES:
            self._flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    @property
    def must_drain(self) -> bool:
        return self._is_paused

    async def drain(self) -> None:
        """Waits until the peer has read enough that more may be queued, or the connection is over.

        Has no deadline of its own: call it under one.
        """
        while self._is_paused and not self._lost.is_set():
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._drain_waiters.add(waiter)
            try:
                await waiter
            finally:
                self._drain_waiters.discard(waiter)

    def close(self, error: KvrelayError | None) -> None:
        """Tells the peer why and closes; a peer that does not read is cut off after `linger_s`."""
        if self._core.state is not ConnectionState.CLOSED:
            self._dispatch(self._core.close(error))

    def abort(self) -> None:
        """Closes at once; what is unsent is lost."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_connected(self) -> bool:
        """Whether there is a socket that is not closed yet."""
        return self._transport is not None and not self._lost.is_set()

    async def wait_lost(self) -> None:
        """Waits until the socket is closed. Short once `close` or `abort` was called; else without a deadline."""
        await self._lost.wait()

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peername = transport.get_extra_info("peername")
        self.address = "peer that has left" if peername is None else format_address(*peername[:2])
        self._transport.set_write_buffer_limits(high=self._core.limits.write_high_water_bytes)
        if self._core.state is ConnectionState.CLOSED:  # refused before it began; the reason is queued
            self._finish()
            return
        self._core.start()
        self._flush()
        self._schedule_tick()

    def data_received(self, data: bytes) -> None:
        self._dispatch(self._core.receive(data, self._loop.time()))

    def eof_received(self) -> bool:
        self._dispatch(self._core.receive_eof("closed by the peer"))
        return False  # the transport closes itself: a side that sends nothing more has left

    def connection_lost(self, exc: Exception | None) -> None:
        self._dispatch(self._core.receive_eof(str(exc) if exc is not None else "closed here"))
        for timer in (self._tick_timer, self._abort_timer, self._flush_handle):
            if timer is not None:
                timer.cancel()
        self._lost.set()
        self._wake_drain_waiters()
        self._on_lost()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._wake_drain_waiters()

    # inside

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if type(event) in _OF_CONNECTION:
                self._dispatch_own(event)
            else:
                self._on_event(event)
        if self._core.num_unsent_bytes:
            self._flush()

    def _dispatch_own(self, event: Event) -> None:
        match event:
            case PeerProved(peer=peer):
                self._answer(peer)
            case ConnectionClosed():
                self._finish()
                self._on_event(event)
            case Opened():
                self._schedule_tick()
                self._on_event(event)

    def _answer(self, peer: PeerIdentity) -> None:
        if self._core.state is ConnectionState.CLOSED:  # bytes behind its proof have closed the connection
            return
        try:
            self._admit(peer)
        except KvrelayError as error:
            self.close(error)
        except Exception:
            logger.exception("the check of peer %s at %s failed", peer, self.address)
            self.close(KvrelayError("the check of the peer failed; see the other side's log"))
        else:
            self._dispatch(self._core.accept())

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        data = self._core.data_to_send(self._loop.time())
        if not data or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        num_unsent_bytes = self._transport.get_write_buffer_size()
        if num_unsent_bytes > self._core.limits.max_unsent_bytes:
            reason = WorkerLost(f"{self._core.peer} at {self.address} does not read: {num_unsent_bytes} bytes wait")
            self.close(reason)
            self._transport.abort()

    def _finish(self) -> None:
        """Sends the reason that the core has queued, then waits for the peer's EOF, but not for long.

        Closing at once would let the kernel answer bytes that we have not read with a reset, and a reset throws away
        what the peer has not read yet: our reason.
        """
        if self._transport is None:
            return
        self._flush()
        self._abort_timer = self._loop.call_later(self._core.limits.linger_s, self._transport.abort)
        if self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # reset by the peer, which the transport has not noticed yet: nobody reads our reason
            self._transport.abort()

    def _schedule_tick(self) -> None:
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        next_s = self._core.next_tick_s()
        if next_s is not None:
            self._tick_timer = self._loop.call_at(next_s, self._tick)

    def _tick(self) -> None:
        # A loop that was held up runs the readers before the timers that are due: bytes that came meanwhile count.
        self._dispatch(self._core.tick(self._loop.time()))
        self._schedule_tick()

    def _wake_drain_waiters(self) -> None:
        for waiter in self._drain_waiters:
            if not waiter.done():
                waiter.set_result(None)
