"""The prefill role's call and its loop of engine steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from kv_transport.choice import RoutedSender
from pd_core.config import Config
from pd_core.engine import Engine
from pd_core.errors import Cancelled, EngineError, InvalidRequest, KvrelayError, WorkerLost
from pd_core.layout import blocks_for
from pd_core.memory import BlockMemory
from pd_core.messages import PathsProbed, ProbePaths, StartPrefill, TokenMade, WorkerEndpoint
from pd_core.request import finish_after
from pd_core.ticket import FirstToken
from pd_core.transfer import PathTotals
from pd_rpc.server import CallContext
from pd_rpc.tasks import BackgroundTasks
from pd_rpc.wire import PeerIdentity
from pd_worker.control import ControlConnections
from pd_worker.outbox import Outbox, let_messages_out
from pd_worker.outgoing import OutgoingHandoff
from pd_worker.outgoing_blocks import DirectBlocks, OutgoingBlocks
from pd_worker.outgoing_path import OutgoingPath
from pd_worker.path_probe import PathProber
from pd_worker.policy import Share, next_shares
from pd_worker.shell import WorkerShell, check_peer, log_extra
from pd_worker.step_run import PartDone, StepRunner
from prefill_worker.job import PrefillJob
from prefill_worker.policy import check_fits, check_range

_log = logging.getLogger(__name__)

SenderFactory = Callable[[BlockMemory, PeerIdentity], RoutedSender]
"""Makes the sending side of the pool."""


class PrefillWorker:
    """One boot of a prefill worker. Belongs to the event loop that starts it; `memory` is its caller's to close.

    memory: what the transport reads; blocks: the pool, and how its blocks get there; None: the memory is the pool
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
        transport: SenderFactory,
        blocks: OutgoingBlocks | None = None,
    ) -> None:
        blocks = DirectBlocks(memory) if blocks is None else blocks
        self._shell = WorkerShell(
            name=name,
            role="prefill",
            incarnation=incarnation,
            secret=secret,
            config=config,
            engine=engine,
            memory=memory,
            pool=blocks,
        )
        identity = self._shell.identity
        self._config = config.prefill
        sender = self._sender = transport(memory, identity)

        def make_control() -> ControlConnections:
            return ControlConnections(identity, secret, check_peer, self._shell.tls)

        push_timeout_s, fail = config.transfer.push_timeout_s, self._shell.fail
        self._path = OutgoingPath(memory, sender, make_control(), self._shell.counters, push_timeout_s, fail, blocks)
        self._prober = PathProber(
            self._shell.ledger,
            memory,
            blocks,
            sender,
            self._shell.requests,
            make_control=make_control,
            push_timeout_s=push_timeout_s,
            on_room=self._shell.room.freed,
            on_failure=fail,
        )
        self._jobs: dict[str, PrefillJob] = {}
        self._runner = StepRunner(self._shell.engine_thread)
        self._loop = asyncio.get_running_loop()
        self._stepping: list[PrefillJob] = []
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
        endpoint = await self._shell.start(self, {StartPrefill: self._start_prefill, ProbePaths: self._probe_paths})
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

    def kv_paths(self) -> dict[str, str]:
        return self._path.paths()

    def transfers(self) -> dict[str, PathTotals]:
        return self._sender.totals()

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

    async def _probe_paths(self, body: ProbePaths, _: CallContext) -> AsyncIterator[PathsProbed]:
        self._shell.check_open()
        yield await self._prober.probe(body.peer, body.num_blocks, body.num_rounds)

    def _admit(self, body: StartPrefill) -> PrefillJob:
        """Takes the prompt's blocks, or raises and takes nothing."""
        shell, request, ticket = self._shell, body.request, body.ticket
        shell.check_request(request)
        check_fits(len(request.tokens), shell.engine.context_tokens, shell.ledger.num_blocks)
        check_range(ticket, len(request.tokens))
        job = PrefillJob(body, [], Outbox(), self._loop.time())
        if job.holder in shell.requests:
            raise InvalidRequest(f"attempt {job.holder} is here already")
        if len(self._jobs) >= self._config.max_running:
            raise shell.no_room(f"{self._config.max_running} prompts are here already")
        num_blocks, num_free = blocks_for(len(request.tokens)), shell.ledger.num_free
        block_ids = shell.ledger.try_hold(job.holder, num_blocks)
        if block_ids is None:
            raise shell.no_room(f"{num_blocks} blocks are needed, {num_free} are free")
        job.block_ids = block_ids
        shell.requests.enter(job.holder)
        self._jobs[job.holder] = job
        in_range = block_ids[ticket.first_block : ticket.first_block + ticket.num_blocks]
        job.handoff = OutgoingHandoff(self._path, ticket, in_range, partial(self._released, job))
        _log.info("prompt of %d tokens admitted", len(request.tokens), extra=log_extra(request, ticket.ref.attempt))
        self._news.set()
        return job

    async def _compute(self) -> None:
        """Step after step for ever; ends by cancellation, and then no step is under way."""
        while True:
            await let_messages_out()
            self._news.clear()
            chosen = self._next_shares()
            if not chosen:
                await self._news.wait()
                continue
            self._stepping = [job for job, _ in chosen]
            try:
                await self._run_step(chosen)
            finally:
                stepping, self._stepping = self._stepping, []
                for job in stepping:
                    if job.is_released:
                        self._free(job)

    def _next_shares(self) -> list[tuple[PrefillJob, Share]]:
        """Whose chunks make up the next step; none when nobody has anything left to compute."""
        jobs = [job for job in self._jobs.values() if not job.is_computed and not job.is_over]
        now_s, chunk_tokens = self._loop.time(), self._config.chunk_tokens
        works = [job.work(now_s) for job in jobs]
        shares = next_shares(works, chunk_tokens, chunk_tokens, self._config.ageing_tokens_per_s)
        return [(jobs[share.index], share) for share in shares]

    async def _run_step(self, chosen: list[tuple[PrefillJob, Share]]) -> None:
        outcomes = await self._runner.run([job.part(share) for job, share in chosen])
        for (job, share), outcome in zip(chosen, outcomes, strict=True):
            match outcome:
                case PartDone():
                    indices = job.take(share, outcome)
                    self._shell.counters.add("prefill_tokens_total", share.num_tokens)
                    if not job.is_over:
                        self._chunk_done(job, indices, outcome)
                case None:
                    continue  # the job is over; had it not been, the next step would be the same again
                case error:
                    _log.error("prefill step failed: %s", error, extra=log_extra(job.request, job.ticket.ref.attempt))
                    self._end(job, error)

    def _chunk_done(self, job: PrefillJob, indices: list[int], done: PartDone) -> None:
        """The first token goes to the router before anything else; then the chunk's blocks to the decode worker."""
        handoff = job.handoff
        if handoff is None:
            return
        if not job.is_computed:
            if indices:
                handoff.blocks_ready(indices)
            return
        if done.token is None:
            self._end(job, EngineError("the engine drew no first token"))
            return
        job.first_token_s = done.ended_s
        finish = finish_after(job.request, done.token, 1)
        first = FirstToken(done.token, job.request.first_index, finish)
        job.outbox.try_put(TokenMade(first.index, done.token, finish))
        if finish is not None:
            job.is_finished = True
            handoff.let_go(Cancelled("the first token was the last"))
            return
        if indices:
            handoff.blocks_ready(indices)
        handoff.prompt_computed(first)

    def _end(self, job: PrefillJob, error: KvrelayError) -> None:
        """From outside or by a failure, at any moment of its life."""
        job.end(error)
        self._runner.reconsider()
        if job.handoff is not None:
            job.handoff.give_up(error)

    def _released(self, job: PrefillJob, error: KvrelayError | None) -> None:
        """The handoff needs our blocks no more: it is committed, let go after the last token, or failed."""
        if job.is_finished:
            error = None
        if error is None:
            job.outbox.try_put(job.report())
        job.end(error)
        self._runner.reconsider()
        job.is_released = True
        if job not in self._stepping:
            self._free(job)

    def _free(self, job: PrefillJob) -> None:
        """Nobody reads or writes our blocks any more."""
        self._shell.ledger.release(job.holder)
        del self._jobs[job.holder]
        self._shell.requests.leave(job.holder)
        self._shell.room.freed()
        extra = log_extra(job.request, job.ticket.ref.attempt) | {"num_chunks": len(job.chunks)}
        _log.info("prompt over", extra=extra)
