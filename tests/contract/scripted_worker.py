"""Workers that follow a script behind a real RpcServer, and a router in front of them: failures at chosen moments.

A script is an async generator over the answers of one call. The usual ones hand over without any KV: prefill draws
token 0 and tells decode through a future; token i of a request is `(sum(prompt) + i) % 95`, so that a text tells whose
it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable

import msgspec
import waiting

from pd_core.config import Config, HeartbeatConfig, PrefillConfig, RouterConfig
from pd_core.ledger import LedgerCounts, LedgerReport
from pd_core.messages import (
    ChunkDone,
    HandoffCommitted,
    LedgerSnapshot,
    PrefillDone,
    PromptAdmitted,
    ReadLedger,
    StartBoth,
    StartDecode,
    StartPrefill,
    TicketGranted,
    TokenMade,
    WatchStatus,
    WorkerEndpoint,
    WorkerState,
    WorkerStatus,
)
from pd_core.request import FinishReason, GenerateRequest
from pd_core.ticket import Ticket, TicketRef
from pd_core.transfer import PathTransfer
from pd_model.fake import fake_model
from pd_rpc.server import CallContext, RpcServer
from pd_rpc.wire import PeerIdentity
from router.service import RouterService
from router.step_clock import StepDeadlines

until = functools.partial(waiting.until, within_s=2.0)
"""What a script or the router is to do, it does at once."""

SECRET = b"the secret of the cluster"
QUICK = HeartbeatConfig(interval_s=0.05, suspect_s=0.4, dead_s=2.0)
"""With the router's own grace of 0.5 s a silent worker is given up after 0.9 s."""

Script = Callable[[StartDecode | StartBoth | StartPrefill], AsyncIterator[msgspec.Struct]]


def token_at(request: GenerateRequest, index: int) -> int:
    return (sum(request.tokens) + index) % 95


def made(request: GenerateRequest, index: int) -> TokenMade:
    """Token `index`, the last one with its reason."""
    finish = FinishReason.LENGTH if index + 1 == request.max_tokens else None
    return TokenMade(index, token_at(request, index), finish)


def granted(body: StartDecode) -> TicketGranted:
    ref = TicketRef(f"ticket-{body.request.request_id}", "boot", 1, body.attempt)
    return TicketGranted(Ticket(ref, body.request.request_id, 0, [0], 3.0, "127.0.0.1", 1, []))


COMMITTED = HandoffCommitted(path="tcp", num_blocks=1, num_bytes=4096, wait_s=0.01)
DONE = PrefillDone(
    chunks=[ChunkDone(0, 3, 0.0, 0.01)], compute_s=0.01, push_s=0.01, transfers=[PathTransfer("tcp", 4096, 0.002)]
)


class Handoffs:
    """What passes from prefill to decode: that token 0 of a request is drawn."""

    def __init__(self) -> None:
        self._drawn: dict[str, asyncio.Event] = {}

    def drawn(self, request_id: str) -> asyncio.Event:
        return self._drawn.setdefault(request_id, asyncio.Event())

    async def decode(self, body: StartDecode) -> AsyncIterator[msgspec.Struct]:
        """A ticket, a commit when prefill is done, then every token, the first one too."""
        yield granted(body)
        await self.drawn(body.request.request_id).wait()
        yield COMMITTED
        for index in range(body.request.max_tokens):
            yield made(body.request, index)
            await asyncio.sleep(0)

    async def both(self, body: StartBoth) -> AsyncIterator[msgspec.Struct]:
        """Prompt and answer from one worker."""
        yield PromptAdmitted()
        for index in range(body.request.max_tokens):
            yield made(body.request, index)
            await asyncio.sleep(0)

    async def prefill(self, body: StartPrefill) -> AsyncIterator[msgspec.Struct]:
        yield made(body.request, 0)
        self.drawn(body.request.request_id).set()
        yield DONE


class ScriptedWorker:
    """One boot of a worker. `script` may be changed at any time; it counts for calls that begin afterwards.

    speaks: cleared, the worker lives but says nothing any more, like a stopped process
    started, ended, cancelled: request ids, in order; ended holds the cancelled ones too
    """

    def __init__(self, name: str, role: str, script: Script, *, incarnation: str = "boot") -> None:
        self.script = script
        self.name = name
        self.role = role
        self.incarnation = incarnation
        self.num_blocks = 64
        self.num_free = 64
        self.context_tokens = 512
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.started: list[StartDecode | StartBoth | StartPrefill] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self._numbers = itertools.count()
        self.counters = {"tokens_made": 5.0}
        self._server = RpcServer(
            PeerIdentity(name, role, incarnation),
            SECRET,
            {
                **dict.fromkeys((StartDecode, StartBoth) if role == "decode" else (StartPrefill,), self._play),
                WatchStatus: self._beat,
                ReadLedger: self._ledger,
            },
        )

    async def start(self) -> WorkerEndpoint:
        host, port = await self._server.start("127.0.0.1", 0)
        return WorkerEndpoint(self.name, self.role, host, port, self.incarnation, pid=1)

    def crash(self) -> None:
        """All connections end at once, as when the process dies; nobody listens any more."""
        assert self._server._listener is not None
        self._server._listener.close()
        for connection in list(self._server._connections):
            connection.link.abort()

    async def close(self) -> None:
        await self._server.close(grace_s=1.0)

    async def _play(
        self, body: StartDecode | StartBoth | StartPrefill, _: CallContext
    ) -> AsyncIterator[msgspec.Struct]:
        self.started.append(body)
        messages = self.script(body)
        try:
            async for message in messages:
                await self.speaks.wait()
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(body.request.request_id)
            raise
        finally:
            self.ended.append(body.request.request_id)

    async def _beat(self, body: WatchStatus, _: CallContext) -> AsyncIterator[msgspec.Struct]:
        while True:
            await self.speaks.wait()
            yield self.status()
            await asyncio.sleep(body.interval_s)

    async def _ledger(self, _: ReadLedger, __: CallContext) -> AsyncIterator[msgspec.Struct]:
        yield LedgerSnapshot(LedgerReport(self.incarnation, self.status().blocks, {}, {}, {}))

    def status(self) -> WorkerStatus:
        held = self.num_blocks - self.num_free
        return WorkerStatus(
            name=self.name,
            role=self.role,
            incarnation=self.incarnation,
            number=next(self._numbers),
            state=WorkerState.READY,
            num_running=len(self.started) - len(self.ended),
            num_waiting=0,
            blocks=LedgerCounts(self.num_blocks, self.num_free, 0, held, 0),
            context_tokens=self.context_tokens,
            pool_tokens=16 * self.num_blocks,
            counters=dict(self.counters),
            detail={"invariance": "bit-exact"},
        )


class Stage:
    """A router with its workers p0 … and d0 …, all in this process, over real sockets."""

    def __init__(self, config: Config, *, num_prefill: int = 1, num_decode: int = 1, stall_s: float = 60.0) -> None:
        self.handoffs = Handoffs()
        decode = self.handoffs.decode if num_prefill else self.handoffs.both
        self.prefills = [ScriptedWorker(f"p{i}", "prefill", self.handoffs.prefill) for i in range(num_prefill)]
        self.decodes = [ScriptedWorker(f"d{i}", "decode", decode) for i in range(num_decode)]
        self.endpoints: list[WorkerEndpoint] = []
        self.router = RouterService(config, SECRET, fake_model(), steps=StepDeadlines(reserve_s=2.0), stall_s=stall_s)
        self.url = ""

    @property
    def workers(self) -> list[ScriptedWorker]:
        return [*self.prefills, *self.decodes]

    @property
    def p0(self) -> ScriptedWorker:
        return self.prefills[0]

    @property
    def d0(self) -> ScriptedWorker:
        return self.decodes[0]

    async def start(self) -> None:
        host, port = await self.router.start()
        self.url = f"http://{host}:{port}"
        self.endpoints = [await worker.start() for worker in self.workers]
        await self.router.set_workers(self.endpoints)
        await until(lambda: self.router.ready()["ready"])

    async def stop(self) -> None:
        await self.router.stop(grace_s=0.2)
        for worker in self.workers:
            await worker.close()

    def is_idle(self) -> bool:
        """Nothing of any request is left, in the router or on a worker."""
        serving = self.router.serving
        ours = sum(worker.num_ours for worker in self.router.fleet.view.workers.values())
        calls = sum(len(worker.started) - len(worker.ended) for worker in self.workers)
        return serving.num_running == serving.num_waiting == ours == calls == 0


@contextlib.asynccontextmanager
async def stage(
    router: RouterConfig = RouterConfig(port=0),  # noqa: B008 - frozen
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    stall_s: float = 60.0,
    prepare: Callable[[Stage], None] = lambda _: None,
) -> AsyncIterator[Stage]:
    """A stage that is ready; afterwards no task of it is left.

    num_prefill: 0 has the decode workers do both phases
    prepare:     changes the workers before they start
    A step has 16 prompt tokens, fewer than any prompt here: of equal prompts one is computed after the other.
    """
    before = asyncio.all_tasks()
    config = Config(
        router=msgspec.structs.replace(router, port=0),
        prefill=PrefillConfig(num_workers=num_prefill, chunk_tokens=16),
        heartbeat=QUICK,
    )
    built = Stage(config, num_prefill=num_prefill, num_decode=num_decode, stall_s=stall_s)
    prepare(built)
    try:
        await built.start()
        yield built
    finally:
        await built.stop()
    await until(lambda: asyncio.all_tasks() <= before)


def chat(text: str = "hello", **more: object) -> dict[str, object]:
    """The body of a chat request."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def num_prompt_tokens(text: str) -> int:
    """One token a character; the fake's template adds the roles."""
    return len(f"user: {text}\nassistant: ")


def expected_text(text: str, num_tokens: int) -> str:
    """What the usual scripts answer to `chat(text)`."""
    model = fake_model()
    tokens = model.tokenizer.encode(model.chat_template.render([{"role": "user", "content": text}]))
    request = GenerateRequest("any", tokens, num_tokens, sampling=None)  # type: ignore[arg-type]
    return model.tokenizer.decode([token_at(request, index) for index in range(num_tokens)])
