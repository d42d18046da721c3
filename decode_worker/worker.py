"""The decode role's calls: admit, take KV in, hand tokens out, give everything back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from decode_worker.batch import DecodeBatch
from decode_worker.policy import check_fits, room_for
from decode_worker.sequence import DecodeSequence, holder_name
from kv_transport.interface import BlockReceiver
from pd_core.config import Config
from pd_core.engine import Engine
from pd_core.errors import (
    Cancelled,
    InvalidRequest,
    InvalidTransition,
    KvrelayError,
    Overloaded,
    ProtocolError,
    TransferError,
    WorkerLost,
)
from pd_core.memory import BlockMemory
from pd_core.messages import (
    AbandonPrefill,
    FinishPrefill,
    HandoffVerdict,
    LeaseHeld,
    RenewLease,
    StartDecode,
    TicketGranted,
    WorkerEndpoint,
)
from pd_core.ticket import FirstToken
from pd_rpc.server import CallContext
from pd_rpc.tasks import BackgroundTasks
from pd_rpc.wire import PeerIdentity
from pd_worker.incoming import IncomingHandoff, IncomingHandoffs, Outcome
from pd_worker.outbox import Outbox
from pd_worker.shell import WorkerShell, log_extra

_log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0

ReceiverFactory = Callable[[BlockMemory, PeerIdentity], BlockReceiver]
"""Makes the receiving side of the pool; not started yet."""


class DecodeWorker:
    """One boot of a decode worker. Belongs to the event loop that starts it; `memory` is its caller's to close."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: str,
        secret: bytes,
        config: Config,
        engine: Engine,
        memory: BlockMemory,
        transport: ReceiverFactory,
    ) -> None:
        self._shell = WorkerShell(
            name=name,
            role="decode",
            incarnation=incarnation,
            secret=secret,
            config=config,
            engine=engine,
            memory=memory,
        )
        shell = self._shell
        self._config = config.decode
        self._receiver = transport(memory, shell.identity)
        self._handoffs = IncomingHandoffs(
            shell.ledger, self._receiver, memory.block_bytes, config.transfer.lease_s, shell.counters, shell.fail
        )
        self._batch = DecodeBatch(shell.engine_thread, shell.counters, self._config.max_batch, self._left)
        self._sequences: dict[str, DecodeSequence] = {}
        self._tasks = BackgroundTasks(shell.fail)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return self._handoffs.num_open

    @property
    def shell(self) -> WorkerShell:
        return self._shell

    async def start(self) -> WorkerEndpoint:
        """Starts everything. Raises ConfigError or OSError when it cannot listen."""
        await self._receiver.start()
        endpoint = await self._shell.start(
            self,
            {
                StartDecode: self._start_decode,
                RenewLease: self._renew_lease,
                FinishPrefill: self._finish_prefill,
                AbandonPrefill: self._abandon_prefill,
            },
        )
        self._handoffs.control_host, self._handoffs.control_port = endpoint.host, endpoint.port
        self._tasks.start(self._batch.run(), "decode-batch")
        return endpoint

    async def wait_failed(self) -> WorkerLost:
        """Returns only when this boot can serve no more, and why."""
        return await self._shell.wait_failed()

    async def stop(self, grace_s: float) -> None:
        """Lets running requests end within `grace_s`, cuts the rest; afterwards nothing of ours is left."""
        await self._shell.drain(grace_s)
        await self._shell.close_server()
        await self._tasks.close()
        await self._shell.close_engine()
        await self._handoffs.close()
        await self._receiver.close()

    def extra_counters(self) -> dict[str, float]:
        totals = self._receiver.counters()
        names = ("kv_bytes_received", "kv_blocks_corrupt", "kv_frames_stale")
        return {f"{name}_total": totals[name] for name in names}

    def cut(self, error: KvrelayError) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence, error)

    async def _start_decode(self, body: StartDecode, _: CallContext) -> AsyncIterator[msgspec.Struct]:
        sequence, handoff = self._admit(body)
        try:
            yield TicketGranted(handoff.ticket)
            async for message in sequence.outbox:
                yield message
        finally:
            if not sequence.is_over:
                # Before the commit the prefill worker counts: it alone knows whether its token was the last.
                if sequence.has_begun:
                    self._shell.counters.add("requests_cancelled_total")
                self._end(sequence, Cancelled("the router has left"))

    async def _renew_lease(self, body: RenewLease, _: CallContext) -> AsyncIterator[LeaseHeld]:
        self._handoffs.find(body.ref).renew()
        yield LeaseHeld()

    async def _finish_prefill(self, body: FinishPrefill, _: CallContext) -> AsyncIterator[HandoffVerdict]:
        handoff = self._handoffs.find(body.ref)
        self._check_first_token(handoff, body.first_token)
        yield HandoffVerdict(await handoff.finish(body.first_token))

    async def _abandon_prefill(self, body: AbandonPrefill, _: CallContext) -> AsyncIterator[LeaseHeld]:
        self._handoffs.find(body.ref).give_up(TransferError(f"the prefill worker gave up: {body.reason}"))
        yield LeaseHeld()

    def _admit(self, body: StartDecode) -> tuple[DecodeSequence, IncomingHandoff]:
        """Takes all the room that the request can ever need, or raises and takes nothing."""
        shell, request = self._shell, body.request
        shell.check_request(request)
        num_prompt = len(request.tokens)
        check_fits(num_prompt, request.max_tokens, shell.engine.context_tokens, shell.ledger.num_blocks)
        sequence = DecodeSequence(request, body.attempt, Outbox())
        if sequence.holder in shell.requests:
            raise InvalidRequest(f"attempt {sequence.holder} is here already")
        if self._handoffs.num_open >= self._config.max_reserved:
            raise Overloaded(f"{self._config.max_reserved} tickets are open already", retry_after_s=RETRY_AFTER_S)
        room = room_for(num_prompt, request.max_tokens)
        num_free = shell.ledger.num_free
        reservation = shell.ledger.try_reserve(room.num_prompt_blocks) if room.num_blocks <= num_free else None
        if reservation is None:
            raise Overloaded(f"{room.num_blocks} blocks are needed, {num_free} are free", retry_after_s=RETRY_AFTER_S)
        shell.ledger.try_hold(sequence.holder, room.num_head_room_blocks)
        shell.requests.enter(sequence.holder)
        self._sequences[sequence.holder] = sequence
        outcome = Outcome(
            partial(self._committed, sequence), partial(self._failed, sequence), partial(self._released, sequence)
        )
        handoff = self._handoffs.issue(request.request_id, body.attempt, reservation, sequence.holder, outcome)
        sequence.handoff = handoff
        _log.info("ticket issued for %d blocks", room.num_blocks, extra=log_extra(request, body.attempt))
        return sequence, handoff

    def _check_first_token(self, handoff: IncomingHandoff, first: FirstToken) -> None:
        """Raises ProtocolError, and the handoff has failed, for a first token that this request cannot have."""
        ticket = handoff.ticket
        sequence = self._sequences.get(holder_name(ticket.request_id, ticket.ref.attempt))
        expected = sequence.request.first_index if sequence is not None else first.index
        if first.index == expected and 0 <= first.token < self._shell.engine.vocab_size:
            return
        error = ProtocolError(f"the prefill's token is {first}; index {expected} was to come")
        handoff.give_up(error)
        raise error

    def _committed(self, sequence: DecodeSequence, first: FirstToken) -> None:
        handoff = sequence.handoff
        if handoff is None:
            raise InvalidTransition(f"committed before it was issued: {sequence.holder}")
        report = handoff.report()
        _log.info(
            "handoff committed", extra=log_extra(sequence.request, sequence.attempt) | msgspec.to_builtins(report)
        )
        sequence.outbox.try_put(report)
        sequence.begin(first, self._shell.ledger.holds(sequence.holder))
        self._batch.join(sequence)
        self._batch.sweep()

    def _failed(self, sequence: DecodeSequence, error: KvrelayError) -> None:
        """Nobody has written into the head-room yet: it is free at once, unlike the reserved blocks."""
        sequence.end(error)
        self._shell.ledger.release(sequence.holder)

    def _released(self, sequence: DecodeSequence) -> None:
        """The reserved blocks of a failed handoff are free too."""
        self._forget(sequence)

    def _left(self, sequence: DecodeSequence) -> None:
        """It ran, it is over, and no step uses its blocks."""
        self._shell.ledger.release(sequence.holder)
        if sequence.handoff is not None:
            self._handoffs.forget(sequence.handoff.ticket.ref)
        self._forget(sequence)

    def _end(self, sequence: DecodeSequence, error: KvrelayError) -> None:
        """From outside, at any moment of its life; its blocks come back as soon as nobody can be in them."""
        sequence.end(error)
        if sequence.handoff is not None:
            sequence.handoff.give_up(error)
        self._batch.sweep()

    def _forget(self, sequence: DecodeSequence) -> None:
        del self._sequences[sequence.holder]
        self._shell.requests.leave(sequence.holder)
        extra = log_extra(sequence.request, sequence.attempt) | {"num_made": sequence.num_made}
        _log.info("request over", extra=extra)
