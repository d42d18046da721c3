"""A prefill and a decode worker in one process, with real control connections, and a router of thirty lines."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
from known_ucx import known_ucx
from waiting import until

from decode_worker.worker import DecodeWorker
from kv_transport import paths
from kv_transport.choice import RoutedSender
from kv_transport.inproc import InprocBlockReceiver, InprocBlockSender, InprocNetwork
from kv_transport.inproc_faults import FaultPlan
from kv_transport.interface import BlockReceiver
from pd_core.config import Config, DecodeConfig, PrefillConfig, TransferConfig
from pd_core.engine import Engine
from pd_core.errors import KvrelayError, TokenMismatch
from pd_core.ledger import LedgerCounts
from pd_core.memory import BlockMemory
from pd_core.messages import (
    WORKER_REPLIES,
    HandoffCommitted,
    Preempted,
    PrefillDone,
    PromptAdmitted,
    PromptComputed,
    ReadLedger,
    StartBoth,
    StartDecode,
    StartPrefill,
    TicketGranted,
    TokenMade,
    WatchStatus,
    WorkerEndpoint,
    WorkerStatus,
)
from pd_core.request import FinishReason, GenerateRequest, SamplingParams
from pd_core.ticket import Ticket
from pd_engine.fake import DECODE_FACTOR, FAKE_LAYOUT, FAKE_NUMERICS, PREFILL_FACTOR, FakeEngine
from pd_rpc.client import RpcClient
from pd_rpc.wire import PeerIdentity
from pd_worker.memory import PoolMemory
from prefill_worker.worker import PrefillWorker

HANDOFF_PATHS = ("shm", "ucx", "tcp", "inproc")
"""Ways that the KV of a handoff can take on this machine."""
SECRET = b"a secret of the tests, long enough"
ROUTER = PeerIdentity("router", "router", "router-boot")
CALL_S = 10.0
LEASE_S = 1.0
"""Long enough for a machine that is busy with other tests."""
SHORT_LEASE_S = 0.3
"""For tests that wait for its end."""
VOCABULARY = 97
CHUNK_TOKENS = 32
CONTEXT_TOKENS = 600


def expected_tokens(
    prompt: list[int], max_tokens: int, stop: tuple[int, ...] = (), *, first_factor: int = PREFILL_FACTOR
) -> list[int]:
    """The fake stream by hand: decode's factor for all tokens but the first, which the prefill worker draws."""
    context, made = list(prompt), []
    for number in range(max_tokens):
        factor = first_factor if number == 0 else DECODE_FACTOR
        token = sum(context[-3:]) * factor % VOCABULARY
        context.append(token)
        made.append(token)
        if token in stop:
            break
    return made


def make_request(
    name: str, num_prompt: int, max_tokens: int, *, seed: int = 0, stop: tuple[int, ...] = ()
) -> GenerateRequest:
    """A prompt of random tokens, the same for the same name and seed."""
    generator = random.Random(f"{name} {seed}")
    tokens = [generator.randrange(VOCABULARY) for _ in range(num_prompt)]
    return GenerateRequest(name, tokens, max_tokens, SamplingParams(), stop_token_ids=list(stop))


def small_config(**changes: object) -> Config:
    """Short leases, small pools, chunks of two blocks."""
    config = Config(
        prefill=PrefillConfig(num_blocks=64, chunk_tokens=CHUNK_TOKENS, max_running=8),
        decode=DecodeConfig(num_blocks=64, max_batch=8, max_reserved=8),
        transfer=TransferConfig(lease_s=LEASE_S, push_timeout_s=2.0),
    )
    return msgspec.structs.replace(config, **changes)


def short_lease(lease_s: float = SHORT_LEASE_S) -> Config:
    return small_config(transfer=TransferConfig(lease_s=lease_s, push_timeout_s=2.0))


@dataclass
class Times:
    """How slow the engines are; see FakeEngine."""

    prefill_chunk_s: float = 0.0
    decode_step_s: float = 0.0


@dataclass
class Rig:
    """Two workers and the router's connections to them."""

    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_end: WorkerEndpoint
    decode_end: WorkerEndpoint
    to_prefill: RpcClient
    to_decode: RpcClient

    def run(self, request: GenerateRequest, attempt: int = 1) -> Run:
        return Run(self, request, attempt)

    def run_both(self, request: GenerateRequest, attempt: int = 1) -> RunBoth:
        """Both phases on the decode worker."""
        return RunBoth(self, request, attempt)

    async def generate(self, request: GenerateRequest, attempt: int = 1) -> list[int]:
        """The whole stream, checked: indices in order, both copies of the first token equal, one finish at the end."""
        return await self.run(request, attempt).tokens()

    async def ledgers(self) -> tuple[LedgerCounts, LedgerCounts]:
        """Counts of (prefill, decode), as the workers report them, after `validate`."""
        self.prefill.shell.ledger.validate()
        self.decode.shell.ledger.validate()
        reports = [await client.call(ReadLedger(), CALL_S) for client in (self.to_prefill, self.to_decode)]
        return reports[0].report.counts, reports[1].report.counts

    async def wait_idle(self, within_s: float = LEASE_S + 2.0) -> None:
        """Both pools are all free within so long."""
        await until(lambda: self.is_idle, within_s)
        assert all(counts.is_idle for counts in await self.ledgers())

    @property
    def is_idle(self) -> bool:
        return self.prefill.shell.ledger.counts().is_idle and self.decode.shell.ledger.counts().is_idle

    async def status(self, client: RpcClient) -> WorkerStatus:
        async with client.stream(WatchStatus(interval_s=1.0), CALL_S) as statuses:
            status = await anext(statuses)
        assert isinstance(status, WorkerStatus)
        return status


class Run:
    """One request through both workers, as a router drives it.

    first_factor: of the worker that draws the first token
    preempted:    how many tokens were made when it lost its blocks, each time
    """

    first_factor = PREFILL_FACTOR

    def __init__(self, rig: Rig, request: GenerateRequest, attempt: int) -> None:
        self.preempted: list[int] = []
        self.request = request
        self.ticket: Ticket | None = None
        self.made: list[TokenMade] = []
        self.committed: HandoffCommitted | None = None
        self.prefill_done: PrefillDone | None = None
        self.granted = asyncio.Event()
        self.first_token = asyncio.Event()
        self.finished = asyncio.Event()
        self._rig = rig
        self._attempt = attempt

    async def tokens(self) -> list[int]:
        """Runs to the last token. Raises what a leg failed with; after the commit the prefill leg does not matter."""
        decode = asyncio.ensure_future(self._decode_leg())
        prefill = asyncio.ensure_future(self._prefill_leg())
        finished = asyncio.ensure_future(self.finished.wait())
        waited_for = {decode, prefill, finished}
        try:
            while not self.finished.is_set():
                done, _ = await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                waited_for -= done
                if prefill in done and self.committed is None:
                    prefill.result()
                if decode in done:
                    decode.result()
                assert self.finished.is_set() or waited_for != {finished}, "both legs ended before the last token"
            if self.committed is None:
                await prefill
        finally:
            for leg in (decode, prefill, finished):
                leg.cancel()
            await asyncio.gather(decode, prefill, finished, return_exceptions=True)
        return [token.token for token in self.made]

    async def _decode_leg(self) -> None:
        body = StartDecode(self.request, self._attempt)
        async with self._rig.to_decode.stream(body, CALL_S) as messages:
            async for message in messages:
                match message:
                    case TicketGranted(ticket=ticket):
                        self.ticket = ticket
                        self.granted.set()
                    case HandoffCommitted():
                        self.committed = message
                    case Preempted(num_made=num_made):
                        self.preempted.append(num_made)
                    case TokenMade():
                        self._deliver(message)

    async def _prefill_leg(self) -> None:
        await self.granted.wait()
        assert self.ticket is not None
        async with self._rig.to_prefill.stream(StartPrefill(self.request, self.ticket), CALL_S) as messages:
            async for message in messages:
                match message:
                    case TokenMade():
                        self._deliver(message)
                    case PrefillDone():
                        self.prefill_done = message

    def _deliver(self, message: TokenMade) -> None:
        """Each index once, in order, and copies must agree."""
        place = message.index - self.request.first_index
        if place < len(self.made):
            if self.made[place] != message:
                raise TokenMismatch(f"{self.made[place]} and {message}")
            return
        assert place == len(self.made), f"{message} came after {len(self.made)} tokens"
        self.made.append(message)
        self.first_token.set()
        if message.finish is not None:
            self.finished.set()


class RunBoth(Run):
    """One request on the decode worker alone."""

    first_factor = DECODE_FACTOR
    prompt_computed: PromptComputed | None = None

    async def tokens(self) -> list[int]:
        """Runs to the last token. Raises what the worker failed with."""
        async with self._rig.to_decode.stream(StartBoth(self.request, self._attempt), CALL_S) as messages:
            assert await anext(messages) == PromptAdmitted()
            self.granted.set()
            async for message in messages:
                match message:
                    case Preempted(num_made=num_made):
                        assert num_made == len(self.made)
                        self.preempted.append(num_made)
                    case TokenMade():
                        self._deliver(message)
                    case PromptComputed():
                        assert (self.prompt_computed, len(self.made)) == (None, 1), "once, with the first token"
                        self.prompt_computed = message
                    case _:
                        raise AssertionError(f"{message} has no place here")
        return [token.token for token in self.made]


def check_stream(run: Run) -> None:
    """The tokens are the hand-computed ones, numbered without a gap, and only the last has a finish reason."""
    request = run.request
    tokens = [message.token for message in run.made]
    stop = tuple(request.stop_token_ids)
    assert tokens == expected_tokens(request.tokens, request.max_tokens, stop, first_factor=run.first_factor)
    assert [message.index for message in run.made] == list(
        range(request.first_index, request.first_index + len(tokens))
    )
    assert all(message.finish is None for message in run.made[:-1])
    stopped = tokens[-1] in request.stop_token_ids
    assert run.made[-1].finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@contextlib.asynccontextmanager
async def workers(
    path: str,
    config: Config | None = None,
    *,
    times: Times | None = None,
    faults: FaultPlan | None = None,
    prefill_numerics: str = FAKE_NUMERICS,
    trick: Callable[[Engine], Engine] = lambda engine: engine,
) -> AsyncIterator[Rig]:
    """Both workers, started and connected; stopped at the end.

    path:  "inproc", or what `transfer.path` may be
    trick: given each engine, the one that the worker gets

    When the block ends and its router has left, every block of both pools must come back without a stop: a test of
    anything is a test of leaks too.
    """
    config = config or small_config()
    times = times or Times()
    network = InprocNetwork()
    transfer = config.transfer if path == "inproc" else msgspec.structs.replace(config.transfer, path=path)
    config = msgspec.structs.replace(config, transfer=transfer)
    assert config.prefill.num_blocks is not None
    assert config.decode.num_blocks is not None
    prefill_memory = PoolMemory(config.prefill.num_blocks, FAKE_LAYOUT.block_bytes)
    decode_memory = PoolMemory(config.decode.num_blocks, FAKE_LAYOUT.block_bytes)
    for memory in (prefill_memory, decode_memory):
        memory.buffer[:] = b"\xfe" * len(memory.buffer)  # what nobody has written must not pass for KV
    prefill_engine = FakeEngine(
        PREFILL_FACTOR,
        prefill_memory,
        chunk_s=times.prefill_chunk_s,
        context_tokens=CONTEXT_TOKENS,
        numerics=prefill_numerics,
    )
    decode_engine = FakeEngine(DECODE_FACTOR, decode_memory, step_s=times.decode_step_s, context_tokens=CONTEXT_TOKENS)

    def make_sender(_: BlockMemory, identity: PeerIdentity) -> RoutedSender:
        if path == "inproc":
            sender = InprocBlockSender(network, prefill_memory, prefill_engine.fingerprint, faults=faults)
            return RoutedSender({path: sender})
        with known_ucx():
            return paths.make_sender(prefill_memory, identity, SECRET, transfer)

    def make_receiver(_: BlockMemory, identity: PeerIdentity) -> BlockReceiver:
        if path == "inproc":
            return InprocBlockReceiver(network, decode_memory, decode_engine.fingerprint, grace_s=0.05)
        with known_ucx():
            return paths.make_receiver(decode_memory, identity, SECRET, transfer)

    prefill = PrefillWorker(
        name="prefill-0",
        incarnation="prefill-boot",
        secret=SECRET,
        config=config,
        engine=trick(prefill_engine),
        memory=prefill_memory,
        transport=make_sender,
    )
    decode = DecodeWorker(
        name="decode-0",
        incarnation="decode-boot",
        secret=SECRET,
        config=config,
        engine=trick(decode_engine),
        memory=decode_memory,
        transport=make_receiver,
    )
    prefill_end, decode_end = await prefill.start(), await decode.start()
    to_prefill, to_decode = await connect(prefill_end), await connect(decode_end)
    rig = Rig(prefill, decode, prefill_end, decode_end, to_prefill, to_decode)
    try:
        yield rig
        await to_prefill.close()
        await to_decode.close()
        await until(lambda: rig.is_idle, config.transfer.lease_s + 2.0)
        prefill.shell.ledger.validate()
        decode.shell.ledger.validate()
    finally:
        await to_prefill.close()
        await to_decode.close()
        await prefill.stop(0.5)
        await decode.stop(0.5)
        prefill_memory.close()
        decode_memory.close()


async def connect(endpoint: WorkerEndpoint) -> RpcClient:
    return await RpcClient.connect(endpoint.host, endpoint.port, identity=ROUTER, secret=SECRET, replies=WORKER_REPLIES)


async def failure_of(rig: Rig, request: GenerateRequest, attempt: int = 1) -> KvrelayError | None:
    """The error that the request ends with; None when all its tokens come and are right."""
    return await outcome_of(rig.run(request, attempt))


async def outcome_of(run: Run) -> KvrelayError | None:
    """The same of a run that has not begun."""
    try:
        await run.tokens()
    except KvrelayError as error:
        return error
    check_stream(run)
    return None
