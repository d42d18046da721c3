"""The prefill role's call and its loop of engine steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from kv_transport.interface import BlockSender
from pd_core.config import Config
from pd_core.engine import Engine, SequenceStep
from pd_core.errors import Cancelled, EngineError, InvalidRequest, KvrelayError, Overloaded, WorkerLost
from pd_core.layout import blocks_for
from pd_core.memory import BlockMemory
from pd_core.messages import StartPrefill, TokenMade, WorkerEndpoint
from pd_core.request import finish_after
from pd_core.ticket import FirstToken
from pd_rpc.server import CallContext
from pd_rpc.tasks import BackgroundTasks
from pd_rpc.wire import PeerIdentity
from pd_worker.control import ControlConnections
from pd_worker.outbox import Outbox
from pd_worker.outgoing import OutgoingHandoff, OutgoingPath
from pd_worker.shell import WorkerShell, check_peer, log_extra
from prefill_worker.job import PrefillJob
from prefill_worker.policy import check_fits, check_range, indices_done, next_prompt

_log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0

SenderFactory = Callable[[BlockMemory, PeerIdentity], BlockSender]
"""Makes the sending side of the pool."""


class PrefillWorker:
    """One boot of a prefill worker. Belongs to the event loop that starts it; `memory` is its caller's to close."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: str,
        secret: bytes,
        config: Config,
        engine: Engine,
        memory: BlockMemory,
        transport: SenderFactory,
    ) -> None:
        self._shell = WorkerShell(
            name=name,
            role="prefill",
            incarnation=incarnation,
            secret=secret,
            config=config,
            engine=engine,
            memory=memory,
        )
        identity = self._shell.identity
        self._config = config.prefill
        self._path = OutgoingPath(
            memory,
            transport(memory, identity),
            ControlConnections(identity, secret, check_peer),
            self._shell.counters,
            config.transfer.push_timeout_s,
            self._shell.fail,
        )
        self._jobs: dict[str, PrefillJob] = {}
        self._stepping: PrefillJob | None = None
        self._news = asyncio.Event()
        self._tasks = BackgroundTasks(self._shell.fail)

    @property
    def num_running(self) -> int:
        return sum(not job.is_computed for job in self._jobs.values())

    @property
    def num_waiting(self) -> int:
        return sum(job.is_computed for job in self._jobs.values())

    @property
    def shell(self) -> WorkerShell:
        return self._shell

    async def start(self) -> WorkerEndpoint:
        """Starts everything. Raises OSError when it cannot listen."""
        endpoint = await self._shell.start(self, {StartPrefill: self._start_prefill})
        self._tasks.start(self._compute(), "prefill-steps")
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
        await self._path.close()

    def extra_counters(self) -> dict[str, float]:
        return {}

    def cut(self, error: KvrelayError) -> None:
        for job in list(self._jobs.values()):
            self._end(job, error)

    async def _start_prefill(self, body: StartPrefill, _: CallContext) -> AsyncIterator[msgspec.Struct]:
        job = self._admit(body)
        try:
            async for message in job.outbox:
                yield message
        finally:
            if not job.is_over:
                if not job.is_finished:
                    self._shell.counters.add("requests_cancelled_total")
                self._end(job, Cancelled("the router has left"))

    def _admit(self, body: StartPrefill) -> PrefillJob:
        """Takes the prompt's blocks, or raises and takes nothing."""
        shell, request, ticket = self._shell, body.request, body.ticket
        shell.check_request(request)
        check_fits(len(request.tokens), shell.engine.context_tokens, shell.ledger.num_blocks)
        check_range(ticket, len(request.tokens))
        job = PrefillJob(body, [], Outbox(), asyncio.get_running_loop().time())
        if job.holder in shell.requests:
            raise InvalidRequest(f"attempt {job.holder} is here already")
        if len(self._jobs) >= self._config.max_running:
            raise Overloaded(f"{self._config.max_running} prompts are here already", retry_after_s=RETRY_AFTER_S)
        num_blocks, num_free = blocks_for(len(request.tokens)), shell.ledger.num_free
        block_ids = shell.ledger.try_hold(job.holder, num_blocks)
        if block_ids is None:
            raise Overloaded(f"{num_blocks} blocks are needed, {num_free} are free", retry_after_s=RETRY_AFTER_S)
        job.block_ids = block_ids
        shell.requests.enter(job.holder)
        self._jobs[job.holder] = job
        in_range = block_ids[ticket.first_block : ticket.first_block + ticket.num_blocks]
        job.handoff = OutgoingHandoff(self._path, ticket, in_range, partial(self._released, job))
        _log.info("prompt of %d tokens admitted", len(request.tokens), extra=log_extra(request, ticket.ref.attempt))
        self._news.set()
        return job

    async def _compute(self) -> None:
        """Chunk after chunk for ever; ends by cancellation, and then no step is under way."""
        while True:
            self._news.clear()
            job = next_prompt(list(self._jobs.values()))
            if job is None:
                await self._news.wait()
                continue
            self._stepping = job
            try:
                await self._run_chunk(job, job.next_step(self._config.chunk_tokens))
            finally:
                self._stepping = None
                if job.is_released:
                    self._free(job)

    async def _run_chunk(self, job: PrefillJob, step: SequenceStep) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            [token] = await self._shell.engine_thread.step([step], job.is_unwanted.is_set)
        except KvrelayError as error:  # Cancelled among them: then the job is over already
            self._end(job, error)
            return
        now_s = asyncio.get_running_loop().time()
        job.take(step, began_s, now_s)
        self._shell.counters.add("prefill_tokens_total", len(step.tokens))
        if not job.is_over:
            self._chunk_done(job, token, now_s)

    def _chunk_done(self, job: PrefillJob, token: int | None, now_s: float) -> None:
        """The first token goes to the router before anything else; then the chunk's blocks to the decode worker."""
        if job.handoff is None:
            return
        if not job.is_computed:
            self._push(job, job.handoff)
            return
        if token is None:
            self._end(job, EngineError("the engine drew no first token"))
            return
        job.first_token_s = now_s
        finish = finish_after(job.request, token, 1)
        first = FirstToken(token, job.request.first_index, finish)
        job.outbox.try_put(TokenMade(first.index, token, finish))
        if finish is not None:
            job.is_finished = True
            job.handoff.let_go(Cancelled("the first token was the last"))
            return
        self._push(job, job.handoff)
        job.handoff.prompt_computed(first)

    def _push(self, job: PrefillJob, handoff: OutgoingHandoff) -> None:
        indices = indices_done(job.ticket, handoff.num_ready, job.num_computed, job.num_prompt)
        if indices:
            handoff.blocks_ready(indices)

    def _end(self, job: PrefillJob, error: KvrelayError) -> None:
        """From outside or by a failure, at any moment of its life."""
        job.end(error)
        if job.handoff is not None:
            job.handoff.give_up(error)

    def _released(self, job: PrefillJob, error: KvrelayError | None) -> None:
        """The handoff needs our blocks no more: it is committed, let go after the last token, or failed."""
        if job.is_finished:
            error = None
        if error is None:
            job.outbox.try_put(job.report(asyncio.get_running_loop().time()))
        job.end(error)
        job.is_released = True
        if job is not self._stepping:
            self._free(job)

    def _free(self, job: PrefillJob) -> None:
        """Nobody reads or writes our blocks any more."""
        self._shell.ledger.release(job.holder)
        del self._jobs[job.holder]
        self._shell.requests.leave(job.holder)
        extra = log_extra(job.request, job.ticket.ref.attempt) | {"num_chunks": len(job.chunks)}
        _log.info("prompt over", extra=extra)
