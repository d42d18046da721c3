"""The decode role's calls: admit, take KV in or make it here, hand tokens out, give everything back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from decode_worker.batch import DecodeBatch
from decode_worker.handoff_calls import HandoffCalls
from decode_worker.life import Phase
from decode_worker.policy import check_fits, most_positions
from decode_worker.roster import Roster
from decode_worker.sequence import DecodeSequence, holder_name
from kv_transport.interface import BlockReceiver
from pd_core.config import Config, prompt_chunk_tokens
from pd_core.engine import Engine
from pd_core.errors import Cancelled, InvalidRequest, InvalidTransition, KvrelayError, WorkerLost
from pd_core.memory import BlockMemory, BlockPool
from pd_core.messages import PromptAdmitted, StartBoth, StartDecode, TicketGranted, WorkerEndpoint
from pd_core.request import GenerateRequest
from pd_core.ticket import FirstToken, TicketRef
from pd_core.transfer import PathTotals
from pd_rpc.server import CallContext, Handler
from pd_rpc.tasks import BackgroundTasks
from pd_rpc.wire import PeerIdentity
from pd_worker.counters import Counters
from pd_worker.incoming import IncomingHandoff, IncomingHandoffs, Outcome
from pd_worker.outbox import Outbox
from pd_worker.probe_target import ProbeTarget
from pd_worker.shell import WorkerShell, log_extra

_log = logging.getLogger(__name__)

ReceiverFactory = Callable[[BlockMemory, PeerIdentity], BlockReceiver]
"""Makes the receiving side of the pool; not started yet."""


class DecodeWorker:
    """One boot of a decode worker. Belongs to the event loop that starts it; `memory` is its caller's to close.

    memory: what the transport writes into; pool: what becomes of that; None: the memory is the pool
    """

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
        pool: BlockPool | None = None,
    ) -> None:
        shell = self._shell = WorkerShell(
            name=name,
            role="decode",
            incarnation=incarnation,
            secret=secret,
            config=config,
            engine=engine,
            memory=memory,
            pool=memory if pool is None else pool,
        )
        self._config = config.decode
        self._receiver = transport(memory, shell.identity)
        self._handoffs = IncomingHandoffs(
            shell.ledger,
            self._receiver,
            memory.block_bytes,
            config.transfer.lease_s,
            config.transfer.digests,
            shell.counters,
            shell.fail,
        )
        self._probes = IncomingHandoffs(
            shell.ledger,
            self._receiver,
            memory.block_bytes,
            config.transfer.lease_s,
            config.transfer.digests,
            Counters(),
            shell.fail,
        )
        self._roster = Roster(
            shell.ledger, config.decode.max_batch, prompt_chunk_tokens(config), config.prefill.ageing_tokens_per_s
        )
        self._batch = DecodeBatch(
            self._roster, shell.engine_thread, shell.counters, on_left=self._left, on_room=self._room_came
        )
        self._probe_target = ProbeTarget(
            shell.ledger,
            self._probes,
            shell.requests,
            num_spare=lambda: self._roster.num_spare_blocks,
            check_open=shell.check_open,
            on_room=self._probe_over,
        )
        self._sequences: dict[str, DecodeSequence] = {}
        self._tasks = BackgroundTasks(shell.fail)

    @property
    def num_running(self) -> int:
        return self._roster.count(Phase.COMPUTING, Phase.RUNNING)

    @property
    def num_waiting(self) -> int:
        return self._handoffs.num_open + self._roster.count(Phase.WAITING)

    @property
    def shell(self) -> WorkerShell:
        return self._shell

    @property
    def roster(self) -> Roster:
        """Who is here; for tests and for /debug."""
        return self._roster

    async def start(self) -> WorkerEndpoint:
        """Starts everything. Raises ConfigError or OSError when it cannot listen."""
        await self._receiver.start()
        calls = HandoffCalls(self._handoff_of, self._request_of, self._shell.engine.vocab_size)
        own: dict[type[msgspec.Struct], Handler] = {StartDecode: self._start_decode, StartBoth: self._start_both}
        endpoint = await self._shell.start(self, {**own, **calls.handlers, **self._probe_target.handlers})
        for handoffs in (self._handoffs, self._probes):
            handoffs.control_host, handoffs.control_port = endpoint.host, endpoint.port
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
        await self._probes.close()
        await self._receiver.close()

    def extra_counters(self) -> dict[str, float]:
        totals = self._receiver.counters()
        return {f"{name}_total": total for name, total in totals.items()}

    def kv_paths(self) -> dict[str, str]:
        return {}

    def transfers(self) -> dict[str, PathTotals]:
        return {}

    def cut(self, error: KvrelayError) -> None:
        self._probe_target.cut(error)
        for sequence in list(self._sequences.values()):
            self._end(sequence, error)

    # the router's calls

    async def _start_decode(self, body: StartDecode, _: CallContext) -> AsyncIterator[msgspec.Struct]:
        sequence, handoff = self._admit_for_handoff(body)
        try:
            yield TicketGranted(handoff.ticket)
            async for message in sequence.outbox:
                yield message
        finally:
            # Before the commit the prefill worker counts: it alone knows whether its token was the last.
            self._router_left(sequence, is_ours_to_count=sequence.num_made > 0)

    async def _start_both(self, body: StartBoth, _: CallContext) -> AsyncIterator[msgspec.Struct]:
        sequence = self._admit_prompt(body)
        try:
            yield PromptAdmitted()
            async for message in sequence.outbox:
                yield message
        finally:
            self._router_left(sequence, is_ours_to_count=True)

    def _admit_for_handoff(self, body: StartDecode) -> tuple[DecodeSequence, IncomingHandoff]:
        """Reserves the prompt's blocks, or raises and takes nothing."""
        shell, request = self._shell, body.request
        sequence = self._check(request, body.attempt)
        num_prompt, num_limit = len(request.tokens), most_positions(len(request.tokens), request.max_tokens)
        reservation = self._roster.try_reserve(sequence.holder, num_prompt, num_limit)
        if reservation is None:
            raise shell.no_room(self._why_no_room(num_prompt, num_limit))
        self._enter(sequence)
        outcome = Outcome(
            partial(self._committed, sequence), partial(self._failed, sequence), partial(self._released, sequence)
        )
        handoff = self._handoffs.issue(request.request_id, body.attempt, reservation, sequence.holder, outcome)
        sequence.handoff = handoff
        _log.info("ticket issued for %d blocks", handoff.ticket.num_blocks, extra=log_extra(request, body.attempt))
        return sequence, handoff

    def _admit_prompt(self, body: StartBoth) -> DecodeSequence:
        """Takes the prompt's blocks, or raises and takes nothing."""
        request, now_s = body.request, asyncio.get_running_loop().time()
        sequence = self._check(request, body.attempt)
        num_prompt, num_limit = len(request.tokens), most_positions(len(request.tokens), request.max_tokens)
        if not self._roster.try_admit(sequence.holder, num_prompt, num_limit, now_s):
            raise self._shell.no_room(self._why_no_room(num_prompt, num_limit))
        self._enter(sequence)
        self._batch.join(sequence)
        _log.info("prompt of %d tokens admitted", num_prompt, extra=log_extra(request, body.attempt))
        return sequence

    def _check(self, request: GenerateRequest, attempt: int) -> DecodeSequence:
        """Raises what a request is refused with whatever the pool looks like."""
        shell = self._shell
        shell.check_request(request)
        check_fits(len(request.tokens), request.max_tokens, shell.engine.context_tokens, shell.ledger.num_blocks)
        sequence = DecodeSequence(request, attempt, Outbox(), asyncio.get_running_loop().time())
        if sequence.holder in shell.requests:
            raise InvalidRequest(f"attempt {sequence.holder} is here already")
        num_open = self._handoffs.num_open + self._roster.count(Phase.COMPUTING)
        if num_open >= self._config.max_reserved:
            raise shell.no_room(f"the KV of {num_open} prompts is still being made")
        return sequence

    def _why_no_room(self, num_prompt: int, num_limit: int) -> str:
        if self._roster.has_waiting:
            return f"{self._roster.count(Phase.WAITING)} preempted sequences wait for blocks and come first"
        num_needed = self._roster.blocks_needed(num_prompt, num_limit)
        return f"{num_needed} blocks are needed, growth included; {self._shell.ledger.num_free} are free"

    def _enter(self, sequence: DecodeSequence) -> None:
        self._shell.requests.enter(sequence.holder)
        self._sequences[sequence.holder] = sequence

    def _handoff_of(self, ref: TicketRef) -> IncomingHandoff:
        return self._probes.find(ref) if ref in self._probes else self._handoffs.find(ref)

    def _request_of(self, request_id: str, attempt: int) -> GenerateRequest | None:
        sequence = self._sequences.get(holder_name(request_id, attempt))
        return None if sequence is None or sequence.num_made else sequence.request

    # what becomes of a handoff

    def _committed(self, sequence: DecodeSequence, first: FirstToken) -> None:
        handoff = sequence.handoff
        if handoff is None:
            raise InvalidTransition(f"committed before it was issued: {sequence.holder}")
        report = handoff.report()
        _log.info(
            "handoff committed", extra=log_extra(sequence.request, sequence.attempt) | msgspec.to_builtins(report)
        )
        self._roster.arrived(sequence.holder)
        sequence.outbox.try_put(report)
        sequence.take(first.token)
        self._batch.join(sequence)
        self._batch.sweep()
        self._room_came()

    def _failed(self, sequence: DecodeSequence, error: KvrelayError) -> None:
        """Its reserved blocks are in quarantine; nothing else was taken yet."""
        sequence.end(error)
        self._roster.leave(sequence.holder)

    def _released(self, sequence: DecodeSequence) -> None:
        """The reserved blocks of a failed handoff are free."""
        self._batch.wake()
        self._forget(sequence)

    # how a request ends

    def _router_left(self, sequence: DecodeSequence, *, is_ours_to_count: bool) -> None:
        if not sequence.is_over:
            if is_ours_to_count:
                self._shell.counters.add("requests_cancelled_total")
            self._end(sequence, Cancelled("the router has left"))

    def _left(self, sequence: DecodeSequence) -> None:
        """It was in the batch, it is over, and its blocks are free."""
        if sequence.handoff is not None:
            self._handoffs.forget(sequence.handoff.ticket.ref)
        self._forget(sequence)

    def _end(self, sequence: DecodeSequence, error: KvrelayError) -> None:
        """From outside, at any moment of its life; its blocks come back as soon as nobody can be in them."""
        sequence.end(error)
        if sequence.handoff is not None:
            sequence.handoff.give_up(error)
        self._batch.sweep()

    def _room_came(self) -> None:
        """Blocks or places came free. While somebody waits for blocks they are no room for newcomers."""
        if not self._roster.has_waiting:
            self._shell.room.freed()

    def _probe_over(self) -> None:
        self._batch.wake()
        self._room_came()

    def _forget(self, sequence: DecodeSequence) -> None:
        del self._sequences[sequence.holder]
        self._shell.requests.leave(sequence.holder)
        self._room_came()
        extra = log_extra(sequence.request, sequence.attempt) | {"num_made": sequence.num_made}
        _log.info("request over", extra=extra)
