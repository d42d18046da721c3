"""The sending side of the path "tcp": one thread and at most one connection for each destination."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from kv_transport.interface import PushReceipt
from kv_transport.push_job import PushJob, PushOutcome, check_push
from kv_transport.tcp import DATA_KIND, DEFAULT_OPTIONS, PATH, TcpOptions, check_identity, check_peer
from kv_transport.tcp_channel import Channel
from kv_transport.thread_group import ThreadGroup
from pd_core.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TransportAddress
from pd_rpc.address import format_address
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.wire import PeerIdentity


class TcpBlockSender:
    """BlockSender of a pool. Its methods belong to one event loop.

    identity: ours; its fingerprint is what the receiver must have too
    secret:   the cluster's
    Raises ConfigError when `identity` does not describe `memory`.
    """

    def __init__(
        self,
        memory: BlockMemory,
        identity: PeerIdentity,
        secret: bytes,
        *,
        options: TcpOptions = DEFAULT_OPTIONS,
    ) -> None:
        check_identity(memory, identity)
        self._memory = memory
        self._identity = identity
        self._secret = secret
        self._options = options
        self._channels: dict[tuple[str, int], Channel] = {}
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
        """See BlockSender.push. Tries the ticket's tcp addresses in order until one is reached.

        Raises LayoutMismatch when the receiver keeps other KV than we make, and ValueError for a push without sense.
        """
        check_push(self._memory, ticket.num_blocks, indices, block_ids, digests)
        addresses = [address for address in ticket.addresses if address.path == PATH]
        if not addresses:
            raise TransferError(f"ticket {ticket.ref.ticket_id} has no tcp address")
        if not indices:
            return PushReceipt(PATH, 0, 0.0)
        where = ", ".join(format_address(address.host, address.port) for address in addresses)
        try:
            async with asyncio.timeout(deadline_s):
                seconds = await self._push_to_first(addresses, ticket, indices, block_ids, digests)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{where}: {len(indices)} blocks were not sent within {deadline_s:g} s") from error
        return PushReceipt(PATH, len(indices) * self._memory.block_bytes, seconds)

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
                    channel.withdraw(job)
                    await _until_done(job.outcome)
                    raise
                return job.outcome.result()

    def _channel(self, address: TransportAddress) -> Channel:
        if self._is_closed:
            raise TransferError("the KV sender is closed")
        key = (address.host, address.port)
        channel = self._channels.get(key)
        if channel is None or channel.is_retired:
            self._forget_retired()
            channel = Channel(address.host, address.port, self._memory, self._options, self._authenticate)
            if self._threads is None:
                self._threads = ThreadGroup(asyncio.get_running_loop())
            self._threads.start(f"kv-send-{channel.address}", channel.run)
            self._channels[key] = channel
        return channel

    def _forget_retired(self) -> None:
        self._channels = {key: channel for key, channel in self._channels.items() if not channel.is_retired}

    def _authenticate(self, sock: socket.socket, within_s: float) -> None:
        authenticate_blocking_as_client(
            sock, self._secret, self._identity, kind=DATA_KIND, deadline_s=within_s, check_peer=check_peer
        )


async def _until_done(future: asyncio.Future[PushOutcome]) -> None:
    """Waits for it however often we are cancelled: until then a thread may read the blocks. The wait is short."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue  # the caller raises the first one
