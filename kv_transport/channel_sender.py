"""The sending side of every path over sockets: threads with a connection each to every destination."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kv_transport.channel import Channel, Wire
from kv_transport.channel_group import ChannelGroup
from kv_transport.interface import PushReceipt
from kv_transport.path_options import PathOptions
from kv_transport.push_job import PushJob, check_push
from kv_transport.stripes import FixedStripes, StripePlan
from kv_transport.thread_group import ThreadGroup
from pd_core.errors import DeadlineExceeded, LayoutMismatch, TransferError, Unreachable
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TransportAddress
from pd_rpc.address import format_address

MAX_DESTINATIONS = 256
"""That are remembered; one with a live connection is never forgotten."""


class ChannelSender:
    """BlockSender of a pool over one path. Its methods belong to one event loop.

    path:      whose addresses of a ticket are taken
    make_wire: how one of them is written to
    make_plan: over how many connections at once; as a rule over one
    """

    def __init__(
        self,
        memory: BlockMemory,
        path: str,
        make_wire: Callable[[TransportAddress], Wire],
        options: PathOptions,
        make_plan: Callable[[], StripePlan] = lambda: FixedStripes(1),
    ) -> None:
        self._memory = memory
        self._path = path
        self._make_wire = make_wire
        self._options = options
        self._make_plan = make_plan
        self._groups: dict[TransportAddress, ChannelGroup] = {}
        self._threads: ThreadGroup | None = None
        self._is_closed = False

    async def push(
        self,
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> PushReceipt:
        """See BlockSender.push. Tries the ticket's addresses of this path in order until one is reached; each has the
        deadline from its turn on.

        Raises Unreachable when none is, LayoutMismatch when the receiver keeps other KV than we make, and ValueError
        for a push without sense.
        """
        check_push(self._memory, ticket, indices, block_ids, digests)
        addresses = [address for address in ticket.addresses if address.path == self._path]
        if not addresses:
            raise TransferError(f"ticket {ticket.ref.ticket_id} has no {self._path} address")
        if not indices:
            return PushReceipt(self._path, 0, 0.0)
        where = ", ".join(format_address(address.host, address.port) for address in addresses)
        try:
            seconds = await self._push_to_first(addresses, ticket, indices, block_ids, digests, deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{where}: {len(indices)} blocks were not sent within {deadline_s:g} s") from error
        return PushReceipt(self._path, len(indices) * self._memory.block_bytes, seconds)

    def path_to(self, incarnation: str) -> str:
        return self._path

    async def close(self) -> None:
        """Pushes that wait or run fail with TransferError. Raises TransferError when a thread does not end."""
        self._is_closed = True
        for group in self._groups.values():
            group.stop()
        self._groups.clear()
        if self._threads is not None:
            # A thread may be looking up a name, which nothing interrupts.
            await self._threads.join(self._options.leave_s)

    async def _push_to_first(
        self,
        addresses: Sequence[TransportAddress],
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> float:
        failures: list[TransferError] = []
        for address in addresses:
            job = PushJob(asyncio.get_running_loop(), ticket.ref, indices, block_ids, digests)
            outcome = await self._group(address).push(job, deadline_s)
            if outcome.error is None:
                return outcome.seconds
            if outcome.was_reached or isinstance(outcome.error, LayoutMismatch):
                raise outcome.error
            failures.append(outcome.error)
        raise Unreachable("; ".join(failure.message for failure in failures))

    def _group(self, address: TransportAddress) -> ChannelGroup:
        group = self._groups.pop(address, None)
        if group is None:
            self._forget_oldest()
            where = format_address(address.host, address.port)
            group = ChannelGroup(
                where, lambda: self._open_channel(address), self._make_plan(), self._memory.block_bytes, self._options
            )
        self._groups[address] = group  # the last one is the one used last
        return group

    def _open_channel(self, address: TransportAddress) -> Channel:
        if self._is_closed:
            raise TransferError("the KV sender is closed")
        channel = Channel(self._make_wire(address), self._options)
        if self._threads is None:
            self._threads = ThreadGroup(asyncio.get_running_loop())
        self._threads.start(f"kv-send-{channel.address}", channel.run)
        return channel

    def _forget_oldest(self) -> None:
        """What was learned of a destination is kept for a while after its connections have ended."""
        for address in [address for address, group in self._groups.items() if group.is_idle]:
            if len(self._groups) < MAX_DESTINATIONS:
                return
            del self._groups[address]
