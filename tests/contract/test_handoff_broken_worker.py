"""A fault of ours in a worker ends its boot: requests fail at once, nobody is taken for ready, nothing is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from leaks import no_leaks
from waiting import until
from worker_rig import (
    CALL_S,
    CHUNK_TOKENS,
    SECRET,
    Rig,
    Run,
    Times,
    connect,
    failure_of,
    make_request,
    workers,
)

from decode_worker.actor import DecodeActor
from pd_core.config import Config, DecodeConfig, FakeEngineConfig, ModelConfig, PrefillConfig
from pd_core.engine import Engine, SequenceStep
from pd_core.errors import KvrelayError, WorkerLost
from pd_core.handoff import PushEnded
from pd_core.messages import WatchStatus, WorkerStatus
from pd_core.ticket import TimePassed
from pd_rpc.client import RpcClient
from prefill_worker.actor import PrefillActor

SLOW = Times(prefill_chunk_s=0.05, decode_step_s=0.02)
TOLD_S = 1.0
"""Whoever has a request there knows within so long."""


class TrickEngine:
    """The engine, until a test gives it something else to do for one step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.once: Callable[[], list[int | None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        tokens = self._engine.step(steps, is_cancelled)
        once, self.once = self.once, None
        return tokens if once is None else once()


def no_tokens() -> list[int | None]:
    return []


def broken() -> list[int | None]:
    raise ValueError("broken")


async def _start(rig: Rig) -> tuple[list[Run], list[asyncio.Task[list[int]]]]:
    """Requests of which the first decodes and the others are in prefill or wait for it."""
    sizes = [5, 6 * CHUNK_TOKENS, 7 * CHUNK_TOKENS, 8 * CHUNK_TOKENS]
    runs = [rig.run(make_request(f"r{num_prompt}", num_prompt, 200)) for num_prompt in sizes]
    tokens = [asyncio.ensure_future(run.tokens()) for run in runs]
    await until(lambda: any(len(run.made) > 2 for run in runs), 2.0)
    return runs, tokens


async def _check_told(tokens: list[asyncio.Task[list[int]]], match: str) -> None:
    async with asyncio.timeout(TOLD_S):
        outcomes = await asyncio.gather(*tokens, return_exceptions=True)
    assert all(isinstance(outcome, KvrelayError) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, WorkerLost) and match in outcome.message for outcome in outcomes), outcomes


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_without_a_result_ends_the_boot_and_every_request(role: str) -> None:
    async with workers("tcp", times=SLOW, trick=TrickEngine) as rig:  # type: ignore[arg-type]
        runs, tokens = await _start(rig)
        worker = rig.prefill if role == "prefill" else rig.decode
        client, end = (rig.to_prefill, rig.prefill_end) if role == "prefill" else (rig.to_decode, rig.decode_end)
        beats = asyncio.ensure_future(_watch(client))
        needed_by = [task for run, task in zip(runs, tokens, strict=True) if role == "decode" or not run.made]
        assert len(needed_by) >= 2
        worker.shell.engine.once = no_tokens  # type: ignore[attr-defined]
        await _check_told(needed_by, f"{role}-0")
        assert isinstance(await asyncio.wait_for(worker.wait_failed(), TOLD_S), WorkerLost)
        await asyncio.wait_for(beats, TOLD_S)
        assert client.is_closed
        with pytest.raises((OSError, KvrelayError)):
            await connect(end)
        rig.decode.cut(WorkerLost("the test is over"))  # what is committed needs no prefill worker
        await asyncio.gather(*tokens, return_exceptions=True)
        await until(lambda: rig.is_idle, 1.0)


async def _watch(client: RpcClient) -> None:
    """Returns when the heartbeats end, which they do with the connection."""
    try:
        async with client.stream(WatchStatus(0.02), CALL_S) as statuses:
            async for status in statuses:
                assert isinstance(status, WorkerStatus)
    except WorkerLost:
        return


async def test_between_the_failure_and_the_end_no_request_is_taken() -> None:
    async with workers("tcp") as rig:
        rig.decode.shell.fail(ZeroDivisionError("oops"))
        failure = await failure_of(rig, make_request("late", 5, 5))
        assert isinstance(failure, WorkerLost)
        assert "ZeroDivisionError: oops" in failure.message


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_raises_anything_fails_its_requests_and_the_boot_goes_on(role: str) -> None:
    async with workers("tcp", trick=TrickEngine) as rig:  # type: ignore[arg-type]
        worker = rig.prefill if role == "prefill" else rig.decode
        worker.shell.engine.once = broken  # type: ignore[attr-defined]
        async with asyncio.timeout(TOLD_S):
            failure = await failure_of(rig, make_request("r", 5, 5))
        assert failure is not None
        assert "ValueError: broken" in failure.message
        await rig.wait_idle(within_s=1.0)
        assert await failure_of(rig, make_request("r", 5, 5), attempt=2) is None


def _break_once(machine: Any, event_type: type) -> None:
    """The machine's next event of this type finds a fault of ours."""
    feed = machine._feed

    def break_once(event: object) -> None:
        if isinstance(event, event_type):
            machine._feed = feed
            raise ZeroDivisionError("a fault of ours")
        feed(event)

    machine._feed = break_once


async def test_a_lease_timer_that_breaks_ends_the_boot() -> None:
    async with workers("tcp", times=SLOW) as rig:
        silent = rig.run(make_request("silent", 20, 5))
        leg = asyncio.ensure_future(silent._decode_leg())
        await silent.granted.wait()
        assert silent.ticket is not None
        _break_once(rig.decode._handoffs.find(silent.ticket.ref), TimePassed)
        with pytest.raises(WorkerLost, match="a fault of ours"):
            await asyncio.wait_for(leg, silent.ticket.lease_s + TOLD_S)
        await asyncio.wait_for(rig.decode.wait_failed(), TOLD_S)


async def test_a_push_whose_end_breaks_ends_the_boot() -> None:
    async with workers("tcp", times=SLOW) as rig:
        tokens = asyncio.ensure_future(rig.generate(make_request("r", 3 * CHUNK_TOKENS, 50)))
        await until(lambda: len(rig.prefill._jobs) == 1, 2.0)
        [job] = rig.prefill._jobs.values()
        _break_once(job.handoff, PushEnded)
        await _check_told([tokens], "a fault of ours")
        await asyncio.wait_for(rig.prefill.wait_failed(), TOLD_S)
        job.handoff._feed(PushEnded())  # type: ignore[union-attr] # what got lost, so that the blocks come back


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("actor_class", [PrefillActor, DecodeActor])
async def test_run_until_stopped_raises_when_the_loop_has_ended(
    actor_class: type[PrefillActor | DecodeActor], tmp_path: Path, logging_as_before: None
) -> None:
    config = Config(
        model=ModelConfig(path="fake", fake=FakeEngineConfig(context_tokens=256)),
        prefill=PrefillConfig(num_blocks=32, chunk_tokens=32),
        decode=DecodeConfig(num_blocks=32),
    )
    async with no_leaks():
        actors = [
            PrefillActor("prefill-0", "p-boot", SECRET, config, [], str(tmp_path), None),
            DecodeActor("decode-0", "d-boot", SECRET, config, [], str(tmp_path), None),
        ]
        ends = [await actor.start() for actor in actors]
        running = [asyncio.ensure_future(actor.run_until_stopped()) for actor in actors]
        clients = [await connect(end) for end in ends]
        place = [type(actor) for actor in actors].index(actor_class)
        workers_of = [actor._worker for actor in actors]
        engine_thread = workers_of[place].shell.engine_thread  # type: ignore[union-attr]
        trick = engine_thread._engine = TrickEngine(engine_thread._engine)
        trick.once = no_tokens
        rig = Rig(*workers_of, *ends, *clients)  # type: ignore[arg-type]
        assert isinstance(await failure_of(rig, make_request("r", 20, 5)), KvrelayError)
        with pytest.raises(WorkerLost, match="ValueError"):
            await asyncio.wait_for(running[place], TOLD_S)
        assert not running[1 - place].done()
        for client in clients:
            await client.close()
        for actor in actors:
            await actor.stop(0.0)
        await running[1 - place]
