"""The receiving side of a pool over any number of paths: one table of permits, one listener for each path.

A ticket may be written over one path first and over another after a failure; because all paths ask the same table,
two of them are never inside one slot, and closing a ticket closes it on all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transport.connection import WriterConnection
from kv_transport.interface import ReceiverEvent
from kv_transport.landing import DirectLanding, Landing
from kv_transport.reception import Reception
from pd_core.errors import InvalidTransition
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TicketRef, TransportAddress


class PathListener(Protocol):
    """Where the writers of one path come in."""

    @property
    def address(self) -> TransportAddress:
        """What writers are told; known after `start`."""
        ...

    @property
    def connections(self) -> list[WriterConnection]:
        """Those that are open now."""
        ...

    async def start(self, reception: Reception) -> None:
        """Binds and listens. Raises ConfigError naming the address when that cannot be."""
        ...

    def stop(self) -> None:
        """Accepts nobody any more and cuts every connection."""
        ...

    async def join(self) -> None:
        """Returns when no thread is left. Raises TransferError when one does not leave."""
        ...


class PoolReceiver:
    """BlockReceiver of a pool.

    memory:    what writers write into
    listeners: one for each path, best first
    landing:   how what is in the memory becomes the pool's blocks; None: the memory is the pool
    grace_s, leave_s: see Reception
    """

    def __init__(
        self,
        memory: BlockMemory,
        listeners: Sequence[PathListener],
        *,
        landing: Landing | None = None,
        grace_s: float = 0.5,
        leave_s: float = 5.0,
    ) -> None:
        self._memory = memory
        self._landing: Landing = DirectLanding(memory) if landing is None else landing
        self._listeners = list(listeners)
        self._grace_s = grace_s
        self._leave_s = leave_s
        self._reception: Reception | None = None

    @property
    def addresses(self) -> list[TransportAddress]:
        """One for each path, best first; known after `start`."""
        return [listener.address for listener in self._listeners]

    @property
    def most_frame_blocks(self) -> int | None:
        return self._landing.most_frame_blocks

    @property
    def reception(self) -> Reception:
        """Permits and counters; for tests."""
        if self._reception is None:
            raise InvalidTransition("the receiver has not been started")
        return self._reception

    @property
    def connections(self) -> list[WriterConnection]:
        """Of all paths; for tests."""
        return [connection for listener in self._listeners for connection in listener.connections]

    async def start(self) -> None:
        """Listens on every path, or on none. Raises ConfigError naming the address where that cannot be."""
        if self._reception is not None:
            raise InvalidTransition("the receiver has been started already")
        self._reception = Reception(
            self._memory, self._landing, asyncio.get_running_loop(), self._grace_s, self._leave_s
        )
        try:
            for listener in self._listeners:
                await listener.start(self._reception)
        except BaseException:
            await self.close()
            raise

    def open_ticket(self, ticket: Ticket, on_event: Callable[[ReceiverEvent], None]) -> None:
        self.reception.open_ticket(ticket, on_event)

    async def close_ticket(self, ref: TicketRef) -> None:
        await self.reception.close_ticket(ref)

    def counters(self) -> dict[str, float]:
        return self.reception.counters()

    async def close(self) -> None:
        """Cuts every connection; returns when no thread is left. Raises TransferError when one does not leave."""
        if self._reception is None:
            return
        for listener in self._listeners:
            listener.stop()
        await self._reception.close()
        for listener in self._listeners:
            await listener.join()
