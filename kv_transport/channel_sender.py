"""The sending side of every path over sockets: one thread and at most one connection for each destination."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kv_transport.channel import Channel, Wire
from kv_transport.interface import PushReceipt
from kv_transport.path_options import PathOptions
from kv_transport.push_job import PushJob, PushOutcome, check_push
from kv_transport.thread_group import ThreadGroup
from pd_core.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TransportAddress
from pd_rpc.address import format_address


class ChannelSender:
    """BlockSender of a pool over one path. Its methods belong to one event loop.

    path:      whose addresses of a ticket are taken
    make_wire: how one of them is written to
    """

    def __init__(
        self, memory: BlockMemory, path: str, make_wire: Callable[[TransportAddress], Wire], options: PathOptions
    ) -> None:
        self._memory = memory
        self._path = path
        self._make_wire = make_wire
        self._options = options
        self._channels: dict[TransportAddress, Channel] = {}
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
        """See BlockSender.push. Tries the ticket's addresses of this path in order until one is reached.

        Raises LayoutMismatch when the receiver keeps other KV than we make, and ValueError for a push without sense.
        """
        check_push(self._memory, ticket.num_blocks, indices, block_ids, digests)
        addresses = [address for address in ticket.addresses if address.path == self._path]
        if not addresses:
            raise TransferError(f"ticket {ticket.ref.ticket_id} has no {self._path} address")
        if not indices:
            return PushReceipt(self._path, 0, 0.0)
        where = ", ".join(format_address(address.host, address.port) for address in addresses)
        try:
            async with asyncio.timeout(deadline_s):
                seconds = await self._push_to_first(addresses, ticket, indices, block_ids, digests)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{where}: {len(indices)} blocks were not sent within {deadline_s:g} s") from error
        return PushReceipt(self._path, len(indices) * self._memory.block_bytes, seconds)

    def path_to(self, incarnation: str) -> str:
        return self._path

    async def close(self) -> None:
        """Pushes that wait or run fail with TransferError. Raises TransferError when a thread does not end."""
        self._is_closed = True
        for channel in self._channels.values():
            channel.stop()
        self._channels.clear()
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
    ) -> float:
        failures: list[TransferError] = []
        for address in addresses:
            job = PushJob(asyncio.get_running_loop(), ticket.ref, indices, block_ids, digests)
            outcome = await self._push_to(address, job)
            if outcome.error is None:
                return outcome.seconds
            if outcome.was_reached or isinstance(outcome.error, LayoutMismatch):
                raise outcome.error
            failures.append(outcome.error)
        if len(failures) == 1:
            raise failures[0]
        raise TransferError("; ".join(failure.message for failure in failures))

    async def _push_to(self, address: TransportAddress, job: PushJob) -> PushOutcome:
        """The outcome of the job; when cancelled, returns only when no thread reads its blocks."""
        while True:
            channel = self._channel(address)
            async with channel.room:
                if not channel.submit(job):
                    continue
                try:
                    await asyncio.wait([job.outcome])
                except asyncio.CancelledError:
                    await _until_done(job.outcome, self._options.withdraw_s)
                    channel.withdraw(job)
                    await _until_done(job.outcome, None)
                    raise
                return job.outcome.result()

    def _channel(self, address: TransportAddress) -> Channel:
        if self._is_closed:
            raise TransferError("the KV sender is closed")
        channel = self._channels.get(address)
        if channel is None or channel.is_retired:
            self._forget_retired()
            channel = Channel(self._make_wire(address), self._options)
            if self._threads is None:
                self._threads = ThreadGroup(asyncio.get_running_loop())
            self._threads.start(f"kv-send-{channel.address}", channel.run)
            self._channels[address] = channel
        return channel

    def _forget_retired(self) -> None:
        self._channels = {address: channel for address, channel in self._channels.items() if not channel.is_retired}


async def _until_done(future: asyncio.Future[PushOutcome], within_s: float | None) -> None:
    """Waits for it however often we are cancelled, at most for `within_s`: until it is done a thread may read the
    blocks. The caller raises the first cancellation."""
    loop = asyncio.get_running_loop()
    ends_s = None if within_s is None else loop.time() + within_s
    while not future.done():
        left_s = None if ends_s is None else ends_s - loop.time()
        if left_s is not None and left_s <= 0:
            return
        try:
            await asyncio.wait([future], timeout=left_s)
        except asyncio.CancelledError:
            continue
