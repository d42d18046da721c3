"""What every worker does whatever its role: it is called, it says how it is, it drains and it stops."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from pd_core.config import Config, check_advertised
from pd_core.engine import Engine
from pd_core.errors import (
    InvalidRequest,
    InvalidTransition,
    KvrelayError,
    LayoutMismatch,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from pd_core.layout import BLOCK_TOKENS, check_pairing
from pd_core.ledger import BlockLedger
from pd_core.memory import BlockMemory, BlockPool
from pd_core.messages import (
    Drain,
    Drained,
    LedgerSnapshot,
    ReadLedger,
    WatchStatus,
    WorkerEndpoint,
    WorkerState,
    WorkerStatus,
)
from pd_core.request import GenerateRequest
from pd_core.transfer import PathTotals
from pd_rpc.server import CallContext, Handler, RpcServer
from pd_rpc.tasks import BackgroundTasks
from pd_rpc.tls import load_tls
from pd_rpc.wire import PeerIdentity
from pd_worker.counters import Counters
from pd_worker.engine_thread import EngineThread
from pd_worker.open_requests import OpenRequests
from pd_worker.room_news import RoomNews

_log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
SETTLE_S = 5.0
"""How long blocks of cut requests may take to come back when a worker stops."""
ENGINE_CLOSE_S = 5.0
LAST_WORDS_S = 0.1
"""How long a worker that has failed still listens, so that its requests' errors get out."""


class Work(Protocol):
    """What the shell asks of a role."""

    @property
    def num_running(self) -> int:
        """Requests that the engine works on."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait for something else: their KV, or the receiver's verdict."""
        ...

    def extra_counters(self) -> Mapping[str, float]:
        """Totals that are counted elsewhere, by metric name."""
        ...

    def kv_paths(self) -> Mapping[str, str]:
        """See WorkerStatus."""
        ...

    def transfers(self) -> Mapping[str, PathTotals]:
        """See WorkerStatus."""
        ...

    def cut(self, error: KvrelayError) -> None:
        """Ends every request with this error."""
        ...


def check_peer(ours: PeerIdentity, theirs: PeerIdentity) -> None:
    """Raises LayoutMismatch when both keep KV and it cannot be exchanged; routers and supervisors keep none."""
    if ours.fingerprint is None or theirs.fingerprint is None:
        return
    try:
        check_pairing(ours.fingerprint, theirs.fingerprint)
    except LayoutMismatch as error:
        raise LayoutMismatch(f"{ours} and {theirs}: {error.message}") from error


class WorkerShell:
    """Server, ledger, engine thread and counters of one boot of a worker. Belongs to the event loop that starts it.

    memory: what the worker's transport reads or writes; pool: the blocks that the ledger counts
    """

    def __init__(
        self,
        *,
        name: str,
        role: str,
        incarnation: str,
        secret: bytes,
        config: Config,
        engine: Engine,
        memory: BlockMemory,
        pool: BlockPool,
    ) -> None:
        self.identity = PeerIdentity(name, role, incarnation, engine.fingerprint)
        self.config = config
        self.secret = secret
        self.tls = load_tls(config.tls)
        self.engine = engine
        self.memory = memory
        self.ledger = BlockLedger(pool.num_blocks, incarnation)
        self.engine_thread = EngineThread(engine, name)
        self.counters = Counters()
        self.requests = OpenRequests()
        self.room = RoomNews()
        self._state = WorkerState.READY
        self._failure: WorkerLost | None = None
        self._failed = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._num_statuses = 0
        self._server: RpcServer | None = None
        self._work: Work | None = None

    async def start(self, work: Work, handlers: Mapping[type[msgspec.Struct], Handler]) -> WorkerEndpoint:
        """Starts engine thread and server; where it can be reached. Raises OSError when it cannot listen."""
        self._work = work
        shared: dict[type[msgspec.Struct], Handler] = {
            WatchStatus: self._watch_status,
            ReadLedger: self._read_ledger,
            Drain: self._drain,
        }
        table = {**shared, **handlers}
        self._server = RpcServer(self.identity, self.secret, table, check_peer=check_peer, tls=self.tls)
        self.engine_thread.start()
        host, port = await self._server.start(self.config.transfer.host, 0)
        check_advertised(host, "transfer.host")
        identity = self.identity
        return WorkerEndpoint(identity.name, identity.role, host, port, identity.incarnation, os.getpid())

    def check_open(self) -> None:
        """Raises WorkerLost after `fail`, Unavailable while draining."""
        if self._failure is not None:
            raise self._failure
        if self._state is WorkerState.DRAINING:
            raise Unavailable(f"{self.identity} is draining", retry_after_s=1.0)

    def check_request(self, request: GenerateRequest) -> None:
        """Raises what `check_open` raises, InvalidRequest for what no engine could run."""
        self.check_open()
        if not request.tokens:
            raise InvalidRequest("the prompt has no tokens", param="messages")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {request.max_tokens}; at least 1", param="max_tokens")
        lowest, highest = min(request.tokens), max(request.tokens)
        if lowest < 0 or highest >= self.engine.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequest(f"token {wrong} is not in a vocabulary of {self.engine.vocab_size}", param="messages")

    def no_room(self, why: str) -> Overloaded:
        """What a request is refused with now; watchers are told as soon as there is room again."""
        self.room.refused()
        return Overloaded(why, retry_after_s=RETRY_AFTER_S)

    def fail(self, fault: BaseException) -> None:
        """A fault of ours: something that requests depend on is not done any more, so this boot can serve none.

        They all end with WorkerLost, no new ones are taken, and after LAST_WORDS_S nobody can call any more.
        """
        if self._failure is not None:
            return
        self._failure = WorkerLost(f"{self.identity} has failed: {type(fault).__name__}: {fault}")
        _log.critical("this boot serves no more", exc_info=fault)
        self._tasks.start(self._leave(self._failure), "leave")

    async def wait_failed(self) -> WorkerLost:
        """Returns only after `fail`, when nobody can call any more; what the requests were told."""
        await self._failed.wait()
        if self._failure is None:
            raise InvalidTransition("left without a failure")
        return self._failure

    async def _leave(self, error: WorkerLost) -> None:
        try:
            if self._work is not None:
                self._work.cut(error)
            await asyncio.sleep(LAST_WORDS_S)
        finally:  # also when a request cannot even be ended: its stream ends with the server
            if self._server is not None:
                await self._server.close()
            self._failed.set()

    async def drain(self, grace_s: float) -> int:
        """Takes no new work, lets what runs end; how many were cut when the grace time was over."""
        self._state = WorkerState.DRAINING
        if await self.requests.wait_empty(grace_s) or self._work is None:
            return 0
        num_cut = len(self.requests)
        _log.warning("%d requests are cut after %g s", num_cut, grace_s)
        self._work.cut(Unavailable(f"{self.identity} is shutting down"))
        return num_cut

    async def close_server(self) -> None:
        """Nobody can call any more; returns when all blocks have come back, or SETTLE_S later."""
        await self._tasks.close()
        if self._server is not None:
            await self._server.close()
        if not await self.requests.wait_empty(SETTLE_S):
            _log.error("%d requests still hold blocks after %g s", len(self.requests), SETTLE_S)

    async def close_engine(self) -> None:
        await self.engine_thread.close(ENGINE_CLOSE_S)

    async def _watch_status(self, body: WatchStatus, _: CallContext) -> AsyncIterator[WorkerStatus]:
        if not body.interval_s > 0:
            raise InvalidRequest(f"an interval of {body.interval_s} s is none", param="interval_s")
        while True:
            mark = self.room.mark()
            yield self._status()
            await self.room.wait(mark, body.interval_s)

    async def _read_ledger(self, _: ReadLedger, __: CallContext) -> AsyncIterator[LedgerSnapshot]:
        yield LedgerSnapshot(self.ledger.report())

    async def _drain(self, body: Drain, _: CallContext) -> AsyncIterator[Drained]:
        yield Drained(await self.drain(body.grace_s))

    def _status(self) -> WorkerStatus:
        self._num_statuses += 1
        work = self._work
        counters = self.counters.values() | {"steps_total": float(self.engine_thread.num_steps)}
        return WorkerStatus(
            name=self.identity.name,
            role=self.identity.role,
            incarnation=self.identity.incarnation,
            number=self._num_statuses,
            state=self._state,
            num_running=work.num_running if work else 0,
            num_waiting=work.num_waiting if work else 0,
            blocks=self.ledger.counts(),
            context_tokens=self.engine.context_tokens,
            pool_tokens=self.ledger.num_blocks * BLOCK_TOKENS,
            counters=counters | dict(work.extra_counters() if work else {}),
            detail=self.engine.invariance_report(),
            kv_paths=dict(work.kv_paths() if work else {}),
            transfers=dict(work.transfers() if work else {}),
        )


def log_extra(request: GenerateRequest, attempt: int) -> dict[str, object]:
    """What every log line about a request carries."""
    return {"request_id": request.request_id, "attempt": attempt}
