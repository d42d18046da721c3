"""A handoff that this worker makes. Runs its machine: pushes, digests, lease renewals, the receiver's verdict.

chunk done -> digest -> push ------- blocks ------> the ticket's pool
every lease_s / 3 ------------------ RenewLease --> its worker
prompt done, last push begins ------ FinishPrefill -> committed, or missing: push again
last push ended -------------------- AllSent
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kv_transport.interface import PushReceipt
from pd_core.errors import (
    DeadlineExceeded,
    KvrelayError,
    LeaseExpired,
    StaleTicket,
    TransferError,
    Unreachable,
    WorkerLost,
)
from pd_core.handoff import (
    Abandon,
    AskVerdict,
    BlocksMissing,
    BlocksReady,
    HandoffCommand,
    HandoffEvent,
    HandoffGivenUp,
    HandoffLife,
    HandoffState,
    PromptComputed,
    Push,
    PushEnded,
    ReceiverCommitted,
    ReleaseBlocks,
    SayAllSent,
    StopPushes,
    step,
)
from pd_core.messages import AbandonPrefill, AllSent, FinishPrefill, HandoffVerdict, LeaseHeld, RenewLease
from pd_core.ticket import FirstToken, Ticket
from pd_core.transfer import PathTransfer
from pd_rpc.address import format_address
from pd_rpc.client import RpcClient
from pd_rpc.limits import MAX_DEADLINE_S
from pd_worker.guard import guarded
from pd_worker.incoming import RENEWALS_PER_LEASE
from pd_worker.outgoing_path import OutgoingPath

_log = logging.getLogger(__name__)

ABANDON_TIMEOUT_S = 1.0
AT_ONCE_S = 1.0
"""A pool that cannot be reached, and says so sooner than this, is tried again: its connection may have been cut."""


class OutgoingHandoff:
    """One handoff from its ticket to the release of our blocks. Belongs to the event loop.

    block_ids:   our blocks of the ticket's range, held by the caller until `on_released`
    on_released: called once; with why the handoff failed, or None when the receiver has committed
    committed_s: when the receiver's word came that it has all, in loop time
    """

    def __init__(
        self,
        path: OutgoingPath,
        ticket: Ticket,
        block_ids: Sequence[int],
        on_released: Callable[[KvrelayError | None], None],
    ) -> None:
        self.ticket = ticket
        self.committed_s: float | None = None
        self._path = path
        self._block_ids = list(block_ids)
        self._digests: dict[int, int] = {}
        self._on_released = on_released
        self._life = HandoffLife(ticket.num_blocks)
        self._error: KvrelayError | None = None
        self._is_receiver_to_be_told = True
        self._is_let_go = False
        self._transfers: dict[str, PathTransfer] = {}
        self._pushes: set[asyncio.Task[None]] = set()
        self._num_arrived = 0
        self._verdict_limit: asyncio.Timeout | None = None
        self._no_way: Unreachable | None = None  # why the last push found none
        self._lease = path.tasks.start(self._keep_lease(), f"lease-{ticket.ref.ticket_id}")

    @property
    def is_over(self) -> bool:
        return self._life.is_over

    @property
    def is_open(self) -> bool:
        """Whether it may still succeed."""
        return self._life.state in (HandoffState.PUSHING, HandoffState.FINISHING)

    @property
    def transfers(self) -> list[PathTransfer]:
        """What was sent so far, by path, in the order in which they were first used."""
        return list(self._transfers.values())

    @property
    def how(self) -> str:
        """How pushes to this receiver go now; see BlockSender.path_to."""
        return self._path.sender.path_to(self.ticket.ref.incarnation)

    @property
    def num_ready(self) -> int:
        """Blocks of the range, from its first on, that have been given to `blocks_ready`."""
        return self._life.num_ready

    def blocks_ready(self, indices: list[int]) -> None:
        """The engine has finished these blocks of the range; they come in order."""
        if self.is_open:
            self._feed(BlocksReady(indices))

    def prompt_computed(self, first_token: FirstToken) -> None:
        """The engine is done; what follows is the transfer's matter."""
        if self.is_open:
            self._feed(PromptComputed(first_token))

    def give_up(self, error: KvrelayError) -> None:
        """Cancelled or failed on our side; the receiver is told."""
        self._feed(HandoffGivenUp(error))

    def let_go(self, error: KvrelayError) -> None:
        """Ends it without a word to the receiver: the router, who has all it wants, takes the ticket back there.

        A word of ours would reach the router by way of the receiver as a failure, perhaps before the last token does.
        Should the router be gone, the lease ends the ticket.
        """
        self._is_receiver_to_be_told = False
        self._is_let_go = True
        self._feed(HandoffGivenUp(error))

    def _feed(self, event: HandoffEvent) -> None:
        self._life, commands = step(self._life, event)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: HandoffCommand) -> None:
        match command:
            case Push(indices=indices):
                name = f"push-{self.ticket.ref.ticket_id}"
                push = self._path.tasks.start(self._push(indices), name)
                self._pushes.add(push)
                push.add_done_callback(guarded(self._push_ended, self._path.on_failure))
            case AskVerdict(first_token=first_token):
                self._path.tasks.start(self._ask_verdict(first_token), f"verdict-{self.ticket.ref.ticket_id}")
            case SayAllSent():
                self._path.tasks.start(self._say_all_sent(), f"all-sent-{self.ticket.ref.ticket_id}")
            case StopPushes():
                for push in self._pushes:
                    push.cancel()
            case Abandon(error=error):
                if self._no_way is not None and type(error) is TransferError:  # blocks are missing, and this is why
                    error = Unreachable(f"{error.message}: {self._no_way.message}")
                self._error = error
                if not self._is_let_go:
                    self._path.counters.add("handoffs_aborted_total")
                _log.info("handoff given up: %s", error, extra=self._extra)
                if self._is_receiver_to_be_told:
                    self._path.tasks.start(self._abandon(error), f"abandon-{self.ticket.ref.ticket_id}")
            case ReleaseBlocks():
                self._lease.cancel()
                if self._error is None:
                    self._path.counters.add("handoffs_committed_total")
                self._on_released(self._error)

    async def _push(self, indices: list[int]) -> None:
        """In parts where a pool takes only so many blocks at once: one is copied while another is on the wire."""
        most = self._path.most_at_once(self.ticket)
        if most is None or len(indices) <= most:
            await self._push_part(indices)
            return
        async with asyncio.TaskGroup() as parts:
            for first in range(0, len(indices), most):
                parts.create_task(self._push_part(indices[first : first + most]))

    async def _push_part(self, indices: list[int]) -> None:
        """A push that breaks is no end: the verdict will say what is missing, as long as the receiver lives.

        One that finds no way to the receiver's pool may be: see `_found_no_way`.
        """
        path, loop = self._path, asyncio.get_running_loop()
        began_s = loop.time()
        block_ids = [self._block_ids[index] for index in indices]
        try:
            with path.in_line() as room_s:
                async with path.blocks.shown(block_ids, room_s) as shown:
                    digests = await self._digests_of(indices, shown) if self.ticket.with_digests else []
                    receipt = await path.sender.push(self.ticket, indices, shown, digests, path.push_timeout_s)
        except KvrelayError as error:
            _log.warning("push of %d blocks failed: %s", len(indices), error, extra=self._extra)
            if isinstance(error, Unreachable):
                self._found_no_way(error, loop.time() - began_s)
            return
        self._no_way = None
        self._note(receipt)
        self._path.counters.add("kv_bytes_sent_total", receipt.num_bytes)

    def _found_no_way(self, error: Unreachable, took_s: float) -> None:
        """Where that took long, each further try would take as long, and no verdict says why."""
        self._no_way = error
        if took_s >= AT_ONCE_S and self.is_open:
            self._feed(HandoffGivenUp(error))

    def _note(self, receipt: PushReceipt) -> None:
        so_far = self._transfers.get(receipt.path, PathTransfer(receipt.path, 0, 0.0))
        num_bytes, seconds = so_far.num_bytes + receipt.num_bytes, so_far.seconds + receipt.seconds
        self._transfers[receipt.path] = PathTransfer(receipt.path, num_bytes, seconds)

    async def _digests_of(self, indices: list[int], shown: Sequence[int]) -> Sequence[int]:
        """Made once for each block, as soon as it is finished. Those of the last chunk are what the client's next token
        waits for: its first blocks leave while the others' are made.

        shown: the blocks of the memory that have the bytes
        """
        known = self._digests
        if self._life.first_token is not None:
            await asyncio.sleep(0)  # the first token is about to leave
            return self._path.late_digests(shown, indices, known)
        new = [index for index in indices if index not in known]
        block_ids = [block_id for index, block_id in zip(indices, shown, strict=True) if index not in known]
        known.update(zip(new, await self._path.digests(block_ids), strict=True))
        return [known[index] for index in indices]

    def _push_ended(self, push: asyncio.Task[None]) -> None:
        """However it ended, also before its first step."""
        self._pushes.discard(push)
        self._feed(PushEnded())
        self._await_verdict_anew()

    async def _ask_verdict(self, first_token: FirstToken) -> None:
        """Takes as long as pushes run and blocks arrive; see OutgoingPath.push_timeout_s."""
        try:
            client = await self._client()
            verdict = await self._hear_verdict(client, first_token)
        except KvrelayError as error:
            return self._receiver_failed(error)
        if self._life.is_over:
            return None  # given up while the answer was on its way
        if not verdict.missing:
            self.committed_s = asyncio.get_running_loop().time()
            return self._feed(ReceiverCommitted())
        _log.warning("%d blocks are missing", len(verdict.missing), extra=self._extra)
        return self._feed(BlocksMissing(verdict.missing))

    async def _hear_verdict(self, client: RpcClient, first_token: FirstToken) -> HandoffVerdict:
        try:
            async with asyncio.timeout(None) as self._verdict_limit:
                self._await_verdict_anew()
                verdict: HandoffVerdict = await client.call(
                    FinishPrefill(self.ticket.ref, first_token), deadline_s=MAX_DEADLINE_S
                )
        except TimeoutError as error:
            silence = f"no block arrived for {self._path.push_timeout_s:g} s, and no verdict came"
            raise DeadlineExceeded(f"{client.peer}: {silence}") from error
        finally:
            self._verdict_limit = None
        return verdict

    def _await_verdict_anew(self) -> None:
        """A push has ended, or the receiver has got blocks: only from now on is it silent."""
        limit = self._verdict_limit
        if limit is None or limit.expired():
            return
        ends_s = asyncio.get_running_loop().time() + self._path.push_timeout_s
        limit.reschedule(None if self._life.num_pushes else ends_s)

    async def _say_all_sent(self) -> None:
        """When it cannot be said, or nobody waits for it any more: the verdict, which is asked for, tells why."""
        try:
            client = await self._client()
            await client.call(AllSent(self.ticket.ref), deadline_s=self._path.push_timeout_s)
        except KvrelayError as error:
            _log.debug("nobody was told that all is sent: %s", error, extra=self._extra)

    async def _keep_lease(self) -> None:
        """Says that we live, first at once, until cancelled; ends the handoff when nobody hears it.

        One that does not answer may hear us all the same: it is told that we gave up, should its link come back.
        """
        client: RpcClient | None = None
        patience_s = min(self.ticket.lease_s, self._path.push_timeout_s)  # both wait for what renewals bring
        try:
            client = await self._client()
            closed = asyncio.ensure_future(client.wait_closed())
            try:
                while not closed.done():
                    held: LeaseHeld = await client.call(RenewLease(self.ticket.ref), deadline_s=self.ticket.lease_s)
                    if held.num_arrived > self._num_arrived:
                        self._num_arrived = held.num_arrived
                        self._await_verdict_anew()
                    await asyncio.wait([closed], timeout=patience_s / RENEWALS_PER_LEASE)
                raise WorkerLost(f"the decode worker of ticket {self.ticket.ref.ticket_id} is lost: {closed.result()}")
            finally:
                closed.cancel()
        except DeadlineExceeded as error:
            self._receiver_failed(WorkerLost(self._unanswered(client, error)), is_silent=True)
        except KvrelayError as error:
            self._receiver_failed(error)

    def _unanswered(self, client: RpcClient | None, error: DeadlineExceeded) -> str:
        """For people. client: None when there was not even a connection"""
        if client is None:
            return error.message
        where = format_address(self.ticket.control_host, self.ticket.control_port)
        return f"{client.peer} at {where} did not answer the prefill worker for {self.ticket.lease_s:g} s"

    async def _abandon(self, error: KvrelayError) -> None:
        """Tells the receiver; when that cannot be, its lease tells it."""
        try:
            client = await self._path.control.client(
                self.ticket.control_host, self.ticket.control_port, self.ticket.ref.incarnation, ABANDON_TIMEOUT_S
            )
            await client.call(AbandonPrefill(self.ticket.ref, error.message), deadline_s=ABANDON_TIMEOUT_S)
        except KvrelayError as failure:
            _log.info("the receiver was not told: %s", failure, extra=self._extra)

    async def _client(self) -> RpcClient:
        ticket = self.ticket
        return await self._path.control.client(
            ticket.control_host, ticket.control_port, ticket.ref.incarnation, ticket.lease_s
        )

    def _receiver_failed(self, error: KvrelayError, *, is_silent: bool = False) -> None:
        if isinstance(error, StaleTicket | LeaseExpired | WorkerLost) and not is_silent:
            self._is_receiver_to_be_told = False  # it knows, or it is gone
        if not self._life.is_over:
            self._feed(HandoffGivenUp(error))

    @property
    def _extra(self) -> dict[str, object]:
        return {"request_id": self.ticket.request_id, "ticket_id": self.ticket.ref.ticket_id}
