"""Tickets that this worker issued. Runs their machines; decides nothing that the machine decides.

StartDecode --issue--> ticket --> writer
                          ^  blocks, lease renewals, end of the prefill
                          `--> commit: the request's blocks   or   abort, quarantine, free
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import msgspec

from kv_transport.interface import BlockReceiver, BlocksArrived, ReceiverEvent, WriterStopped
from pd_core.errors import Cancelled, KvrelayError, StaleTicket, TransferError
from pd_core.ledger import BlockLedger, Reservation
from pd_core.messages import HandoffCommitted
from pd_core.ticket import (
    BlockCorrupt,
    BlockVerified,
    CountCorrupt,
    FirstToken,
    FreeBlocks,
    GivenUp,
    JoinBatch,
    LeaseRenewed,
    PrefillFinished,
    Revoke,
    Seal,
    Ticket,
    TicketCommand,
    TicketEvent,
    TicketRef,
    TicketState,
    TimePassed,
    WritersGone,
    issue,
    step,
)
from pd_rpc.tasks import BackgroundTasks
from pd_worker.counters import Counters
from pd_worker.guard import guarded
from pd_worker.verdict import Arrival, answer_at_s

_log = logging.getLogger(__name__)

CLOSE_RETRY_S = 0.1
LATE_S = 0.02
"""A timer that fires so late shows that this process was kept from running."""
RENEWALS_PER_LEASE = 3
"""How often a writer says that it lives, and may therefore be one third of a lease away from saying so."""


class Outcome(msgspec.Struct, frozen=True):
    """Whom a handoff tells what became of it. Called on the event loop; exactly one of the first two.

    committed: the blocks are the holder's
    failed:    the handoff is over, its blocks are not free yet
    released:  after `failed`: they are
    """

    committed: Callable[[FirstToken], None]
    failed: Callable[[KvrelayError], None]
    released: Callable[[], None]


class IncomingHandoff:
    """One ticket from its issue to its end. Belongs to the event loop."""

    def __init__(self, home: IncomingHandoffs, ticket: Ticket, holder: str, outcome: Outcome) -> None:
        self.ticket = ticket
        self.num_bytes = 0
        self._paths: set[str] = set()
        self._home = home
        self._holder = holder
        self._outcome = outcome
        self._loop = asyncio.get_running_loop()
        self.issued_s = self._loop.time()
        self._life = issue(ticket.ref, ticket.num_blocks, ticket.lease_s, self.issued_s)
        self._error: KvrelayError | None = None
        self._corrupt: set[int] = set()
        self._has_broken = False
        self._is_all_sent = False
        self._last_news_s = self.issued_s
        self._last_arrival_s: float | None = None
        self._longest_gap_s = 0.0
        self._news = asyncio.Event()
        self._is_closing = False
        self._num_postponed = 0
        self._look_at(self._life.silent_after_s)

    @property
    def is_over(self) -> bool:
        return self._life.is_over

    @property
    def num_arrived(self) -> int:
        """Blocks that are there and right."""
        return self._life.arrived.bit_count()

    def report(self) -> HandoffCommitted:
        """What the committed handoff was, for the router."""
        ticket, waited_s = self.ticket, self._loop.time() - self.issued_s
        paths = [address.path for address in ticket.addresses if address.path in self._paths]
        return HandoffCommitted("+".join(paths), ticket.num_blocks, self.num_bytes, waited_s)

    def renew(self) -> None:
        """The writer is alive. Raises StaleTicket when the handoff has failed."""
        self._feed(LeaseRenewed(self.ticket.ref, self._loop.time()))

    def give_up(self, error: KvrelayError) -> None:
        """Ends the handoff, unless it is committed or has failed already."""
        if self._life.is_open:
            self._feed(GivenUp(error))

    async def finish(self, first_token: FirstToken) -> list[int]:
        """The writer's word that the rest is on its way. Returns what is missing, in order; nothing after the commit.

        What is missing it says after `all_sent`, when nothing comes any more: bounded by the writer's word and, where
        that does not come, by its lease. Raises StaleTicket, or why the handoff failed meanwhile.
        """
        self._feed(PrefillFinished(self.ticket.ref, first_token, self._loop.time()))
        self._last_news_s = self._loop.time()
        while not self._is_decided:
            answer_s = self._answer_at_s()
            if answer_s is not None and self._loop.time() >= answer_s:
                self._corrupt.clear()
                self._has_broken = self._is_all_sent = False
                return self._life.missing
            await self._wait_for_news(answer_s)
        if self._error is not None:
            raise self._error
        return []

    def all_sent(self) -> None:
        """Nothing is on its way any more. May come before `finish`. Raises StaleTicket when the handoff has failed."""
        self.renew()
        self._is_all_sent = True
        self._last_news_s = self._loop.time()

    @property
    def _is_decided(self) -> bool:
        return self._error is not None or self._life.state is TicketState.COMMITTED

    def _answer_at_s(self) -> float | None:
        """When to say what is missing; None while something is on its way, or while the last writers leave."""
        if not self._is_all_sent or self._life.state is TicketState.SEALING:
            return None
        missing = self._life.missing
        arrival = Arrival(len(missing), len(self._corrupt), self._has_broken, self._last_news_s, self._longest_gap_s)
        return answer_at_s(arrival, self._home.block_bytes)

    async def _wait_for_news(self, until_s: float | None) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout_at(until_s):
                await self._news.wait()
        except TimeoutError:
            return

    def on_receiver_event(self, event: ReceiverEvent) -> None:
        """What the transport saw. Events of a decided ticket were under way when it was decided."""
        now_s = self._last_news_s = self._loop.time()
        match event:
            case BlocksArrived(ref=ref, verified=verified, corrupt=corrupt, num_bytes=num_bytes, path=path):
                self.num_bytes += num_bytes
                if self._last_arrival_s is not None:
                    self._longest_gap_s = max(self._longest_gap_s, now_s - self._last_arrival_s)
                self._last_arrival_s = now_s
                if verified:
                    self._paths.add(path)
                self._corrupt.difference_update(verified)
                events: list[TicketEvent] = [BlockVerified(ref, index, now_s) for index in verified]
                events += [BlockCorrupt(ref, index, now_s) for index in corrupt]
                for block_event in events:
                    if self._life.is_open:
                        self._feed(block_event)
            case WriterStopped(reason=reason):
                _log.warning("a writer stopped: %s", reason, extra=self._extra)
                self._has_broken = True
                self._news.set()

    def _look_at(self, due_s: float) -> None:
        self._timer = self._loop.call_at(due_s, guarded(self._on_timer, self._home.on_failure), due_s)

    def _on_timer(self, due_s: float) -> None:
        """The lease may have run out. When it was us who were away, what the writer said meanwhile is read first.

        A loop that is late all the time puts the end off by one lease in all, then the silence counts.
        """
        now_s = self._loop.time()
        if now_s - due_s > LATE_S and self._num_postponed < RENEWALS_PER_LEASE:
            self._num_postponed += 1
            self._look_at(now_s + self.ticket.lease_s / RENEWALS_PER_LEASE)
            return
        self._feed(TimePassed(now_s))
        if self._life.state in (TicketState.RESERVED, TicketState.FILLING):
            self._look_at(max(self._life.silent_after_s, now_s))

    def _feed(self, event: TicketEvent) -> None:
        before_s = self._life.silent_after_s
        self._life, commands = step(self._life, event)
        if self._life.silent_after_s > before_s:  # the writer was heard
            self._num_postponed = 0
        self._news.set()
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: TicketCommand) -> None:
        ledger, epoch = self._home.ledger, self.ticket.ref.epoch
        match command:
            case CountCorrupt(index=index):
                self._corrupt.add(index)
            case Seal():
                self._close_permit()
            case JoinBatch(first_token=first_token):
                self._timer.cancel()
                ledger.commit(epoch, self._holder)
                self._home.counters.add("handoffs_committed_total")
                self._outcome.committed(first_token)
            case Revoke(error=error):
                self._timer.cancel()
                _log.info("handoff aborted: %s", error, extra=self._extra)
                ledger.abort(epoch)
                if not isinstance(error, Cancelled):  # taken back by the router, who may have had its last token
                    self._home.counters.add("handoffs_aborted_total")
                self._error = error
                self._close_permit()
                self._outcome.failed(error)
            case FreeBlocks():
                ledger.end_quarantine(epoch)
                self._home.forget(self.ticket.ref)
                self._outcome.released()

    def _close_permit(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._home.tasks.start(self._await_writers_gone(), f"close-ticket-{self.ticket.ref.ticket_id}")

    async def _await_writers_gone(self) -> None:
        """Until the transport vouches for it the blocks stay where they are: a leak is better than a wrong write."""
        while True:
            try:
                await self._home.receiver.close_ticket(self.ticket.ref)
            except TransferError as error:
                _log.error("blocks stay in quarantine: %s", error, extra=self._extra)
                await asyncio.sleep(CLOSE_RETRY_S)
            else:
                return self._feed(WritersGone())

    @property
    def _extra(self) -> dict[str, object]:
        return {"request_id": self.ticket.request_id, "ticket_id": self.ticket.ref.ticket_id}


class IncomingHandoffs:
    """The tickets of one pool, by id. Belongs to the event loop.

    with_digests: see Ticket
    control_host, control_port: where writers of our tickets find us; known after the server has started
    on_failure: told of faults of ours, after which tickets are no longer looked after
    """

    def __init__(
        self,
        ledger: BlockLedger,
        receiver: BlockReceiver,
        block_bytes: int,
        lease_s: float,
        with_digests: bool,
        counters: Counters,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.ledger = ledger
        self.receiver = receiver
        self.block_bytes = block_bytes
        self.counters = counters
        self.tasks = BackgroundTasks(on_failure)
        self.on_failure = on_failure
        self.control_host = ""
        self.control_port = 0
        self._lease_s = lease_s
        self._with_digests = with_digests
        self._by_ref: dict[TicketRef, IncomingHandoff] = {}

    @property
    def num_open(self) -> int:
        """Tickets that are neither committed nor released."""
        return sum(not handoff.is_over for handoff in self._by_ref.values())

    def issue(
        self, request_id: str, attempt: int, reservation: Reservation, holder: str, outcome: Outcome
    ) -> IncomingHandoff:
        """A ticket for the reserved blocks, which become `holder`'s when it is committed.

        Raises what the receiver raises when it opens no permit; the handoff has failed then, as `outcome` was told.
        """
        ref = TicketRef(secrets.token_hex(8), self.ledger.incarnation, reservation.epoch, attempt)
        ticket = Ticket(
            ref=ref,
            request_id=request_id,
            first_block=0,
            block_ids=reservation.block_ids,
            lease_s=self._lease_s,
            control_host=self.control_host,
            control_port=self.control_port,
            addresses=self.receiver.addresses,
            with_digests=self._with_digests,
            most_frame_blocks=self.receiver.most_frame_blocks,
        )
        handoff = IncomingHandoff(self, ticket, holder, outcome)
        self._by_ref[ref] = handoff
        try:
            self.receiver.open_ticket(ticket, guarded(handoff.on_receiver_event, self.on_failure))
        except KvrelayError as error:
            handoff.give_up(error)
            raise
        return handoff

    def __contains__(self, ref: TicketRef) -> bool:
        """Whether it is a ticket of ours that is not forgotten."""
        return ref in self._by_ref

    def find(self, ref: TicketRef) -> IncomingHandoff:
        """Raises StaleTicket when it is no ticket of ours, or over and forgotten."""
        handoff = self._by_ref.get(ref)
        if handoff is None:
            raise StaleTicket(f"nobody waits for {ref}")
        return handoff

    def forget(self, ref: TicketRef) -> None:
        """The ticket's request is over; a writer that still comes is late."""
        self._by_ref.pop(ref, None)

    async def close(self) -> None:
        await self.tasks.close()
