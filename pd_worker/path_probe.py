"""How fast each path from this worker's pool to another's is, by handoffs of blocks that nobody needs.

one round:  OpenProbe ------------------------------> blocks set aside there, a ticket
            blocks, digests, FinishPrefill =========> its word that it has all, and both sides' blocks are free
A ticket that names one path has its push go over that one. A round with the whole ticket goes as a handoff would.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kv_transport.interface import BlockSender, PushReceipt
from pd_core.errors import DeadlineExceeded, InvalidRequest, KvrelayError, Overloaded, TransferError
from pd_core.ledger import BlockLedger
from pd_core.memory import BlockMemory
from pd_core.messages import OpenProbe, PathsProbed, RenewLease, TicketGranted, WorkerEndpoint
from pd_core.ticket import FirstToken, Ticket
from pd_core.transfer import ProbedPath
from pd_rpc.client import RpcClient
from pd_rpc.tasks import finish_regardless
from pd_worker.control import ControlConnections
from pd_worker.counters import Counters
from pd_worker.open_requests import OpenRequests
from pd_worker.outgoing import OutgoingHandoff
from pd_worker.outgoing_blocks import OutgoingBlocks
from pd_worker.outgoing_path import OutgoingPath
from pd_worker.probe_target import RETRY_AFTER_S, check_probe_size

MAX_ROUNDS = 100
PUSH_S = 5.0
"""A push of a probe that takes longer has failed."""
CALL_S = 5.0
SETTLE_S = 1.0
"""How much longer than two pushes a round may take."""
FIRST_TOKEN = FirstToken(0, 0)
"""The end of a handoff needs one; nobody will decode after it."""


class PathProber:
    """One probe at a time. Belongs to the event loop.

    make_control: control connections for one probe; it closes them
    on_room:      called when blocks have come free
    on_failure:   told of faults of ours
    """

    def __init__(
        self,
        ledger: BlockLedger,
        memory: BlockMemory,
        blocks: OutgoingBlocks,
        sender: BlockSender,
        requests: OpenRequests,
        *,
        make_control: Callable[[], ControlConnections],
        push_timeout_s: float,
        on_room: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._ledger = ledger
        self._memory = memory
        self._blocks = blocks
        self._sender = sender
        self._requests = requests
        self._make_control = make_control
        self._push_s = min(push_timeout_s, PUSH_S)
        self._on_room = on_room
        self._on_failure = on_failure
        self._is_busy = False

    async def probe(self, peer: WorkerEndpoint, num_blocks: int, num_rounds: int) -> PathsProbed:
        """See ProbePaths. Cancelled, it returns when nothing reads our blocks any more and all are free."""
        check_probe_size(num_blocks, self._memory.block_bytes)
        if not 1 <= num_rounds <= MAX_ROUNDS:
            raise InvalidRequest(
                f"num_rounds is {num_rounds}; it must be between 1 and {MAX_ROUNDS}", param="num_rounds"
            )
        if self._is_busy:
            raise Overloaded("another probe is under way on this worker", retry_after_s=RETRY_AFTER_S)
        self._is_busy = True
        control, sender = self._make_control(), _NotingSender(self._sender)
        path = OutgoingPath(self._memory, sender, control, Counters(), self._push_s, self._on_failure, self._blocks)
        try:
            return await _Probe(self._ledger, self._requests, path, sender, peer, self._on_room).run(
                num_blocks, num_rounds
            )
        finally:
            self._is_busy = False
            await path.close()


class _NotingSender:
    """BlockSender over the worker's own, which stays open: notes what became of the pushes of one round."""

    def __init__(self, sender: BlockSender) -> None:
        self._sender = sender
        self.begin_round()

    def begin_round(self) -> None:
        self.receipt: PushReceipt | None = None
        self.failed: asyncio.Future[KvrelayError] = asyncio.get_running_loop().create_future()

    async def push(
        self,
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> PushReceipt:
        failed = self.failed
        try:
            self.receipt = await self._sender.push(ticket, indices, block_ids, digests, deadline_s)
        except KvrelayError as error:
            if not failed.done():
                failed.set_result(error)
            raise
        return self.receipt

    def path_to(self, incarnation: str) -> str:
        return self._sender.path_to(incarnation)

    async def close(self) -> None:
        """The worker's own sender goes on."""


class _Probe:
    """One pair of workers."""

    def __init__(
        self,
        ledger: BlockLedger,
        requests: OpenRequests,
        path: OutgoingPath,
        sender: _NotingSender,
        peer: WorkerEndpoint,
        on_room: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._requests = requests
        self._path = path
        self._sender = sender
        self._peer = peer
        self._on_room = on_room
        self._holder = f"probe of {peer.name}"
        self._loop = asyncio.get_running_loop()
        self._control_s: list[float] = []
        self._offered: list[str] = []

    async def run(self, num_blocks: int, num_rounds: int) -> PathsProbed:
        in_use: str | None = None
        try:
            await self._round(1, None)
            in_use = None if self._sender.receipt is None else self._sender.receipt.path
        except (TransferError, DeadlineExceeded):
            if not self._offered:
                raise  # it had no ticket yet: the two do not even speak
        how = self._sender.path_to(self._peer.incarnation)
        probed = [await self._probe_path(path, num_blocks, num_rounds) for path in self._offered]
        return PathsProbed(
            paths=probed,
            in_use=in_use,
            how=how,
            control_s=statistics.median(self._control_s),
            num_blocks=num_blocks,
            num_rounds=num_rounds,
            block_bytes=self._path.block_bytes,
        )

    async def _probe_path(self, path: str, num_blocks: int, num_rounds: int) -> ProbedPath:
        """The first push connects, and does not count."""
        try:
            await self._round(1, path)
            one_s = [await self._round(1, path) for _ in range(num_rounds)]
            all_s = [await self._round(num_blocks, path) for _ in range(num_rounds)]
        except (TransferError, DeadlineExceeded) as error:
            return ProbedPath(path, reason=error.message)
        rate = num_blocks * self._path.block_bytes / statistics.median(all_s)
        return ProbedPath(path, bytes_per_s=rate, latency_s=statistics.median(one_s))

    async def _round(self, num_blocks: int, only: str | None) -> float:
        """Seconds from the push to the receiver's word. only: the path that it must take

        Raises TransferError or DeadlineExceeded when the blocks do not get there.
        """
        block_ids = self._ledger.try_hold(self._holder, num_blocks)
        if block_ids is None:
            why = f"a probe needs {num_blocks} blocks; {self._ledger.num_free} are free on the prefill worker"
            raise Overloaded(why, retry_after_s=RETRY_AFTER_S)
        self._requests.enter(self._holder)
        try:
            client = await self._client()
            granted: TicketGranted = await client.call(OpenProbe(num_blocks), deadline_s=CALL_S)
            return await self._hand_over(client, self._narrowed(granted.ticket, only), block_ids)
        finally:
            self._ledger.release(self._holder)
            self._requests.leave(self._holder)
            self._on_room()

    def _narrowed(self, ticket: Ticket, only: str | None) -> Ticket:
        self._offered = list(dict.fromkeys(address.path for address in ticket.addresses))
        if only is None:
            return ticket
        addresses = [address for address in ticket.addresses if address.path == only]
        return msgspec.structs.replace(ticket, addresses=addresses)

    async def _hand_over(self, client: RpcClient, ticket: Ticket, block_ids: list[int]) -> float:
        """Returns and raises when nothing reads our blocks any more, also when it is cancelled."""
        self._sender.begin_round()
        released: asyncio.Future[KvrelayError | None] = self._loop.create_future()
        handoff = OutgoingHandoff(self._path, ticket, block_ids, released.set_result)
        why: KvrelayError = DeadlineExceeded(f"{self._holder}: no word of the receiver in time")
        try:
            await self._time_call(client, ticket)
            began_s = self._loop.time()
            handoff.blocks_ready(list(range(ticket.num_blocks)))
            handoff.prompt_computed(FIRST_TOKEN)
            failed = self._sender.failed
            ends: list[asyncio.Future[Any]] = [released, failed]
            round_s = 2 * self._path.push_timeout_s + SETTLE_S
            await asyncio.wait(ends, timeout=round_s, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                why = failed.result()
        finally:
            handoff.give_up(why)  # changes nothing when it is committed
            error = await finish_regardless(released)
        if error is not None:
            raise error
        if handoff.committed_s is None:
            raise TransferError(f"{self._holder}: released before it was committed")
        return handoff.committed_s - began_s

    async def _time_call(self, client: RpcClient, ticket: Ticket) -> None:
        """A bare call; the one before it waits until the handoff's own first call is out of the way."""
        await client.call(RenewLease(ticket.ref), deadline_s=CALL_S)
        began_s = self._loop.time()
        await client.call(RenewLease(ticket.ref), deadline_s=CALL_S)
        self._control_s.append(self._loop.time() - began_s)

    async def _client(self) -> RpcClient:
        peer = self._peer
        return await self._path.control.client(peer.host, peer.port, peer.incarnation, CALL_S)
