"""Workers as real processes that are killed or stand still, at any moment of a handoff, over every path.

Never a wrong token, never a block that does not come back, never a wait beyond the deadlines.
"""

from __future__ import annotations

import asyncio
import random
import signal

import msgspec
import pytest
from worker_processes import WorkerProcess, pair_of, worker_processes
from worker_rig import HANDOFF_PATHS, Rig, check_stream, make_request

from pd_core.config import Config, DecodeConfig, FakeEngineConfig, ModelConfig, PrefillConfig, TransferConfig
from pd_core.errors import KvrelayError

SOCKET_PATHS = [path for path in HANDOFF_PATHS if path != "inproc"]
LEASE_S = 1.0
BACK_S = LEASE_S + 2.0
"""When the last block must be free again, whatever has happened."""
KNOWN_S = 2 * LEASE_S + 2.0
"""When whoever waits must know."""
PROMPT = 100
FEW_AND_MANY = [
    pytest.param(2, marks=pytest.mark.cluster),
    pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]
LONGEST_S = 0.2
"""About what a request takes: moments are drawn from it."""


def config(path: str) -> Config:
    """A pool that holds two prompts and their answers."""
    built = Config(
        model=ModelConfig(path="fake", fake=FakeEngineConfig(context_tokens=256, step_s=0.01)),
        prefill=PrefillConfig(num_blocks=64, chunk_tokens=32),
        decode=DecodeConfig(num_blocks=20, max_batch=8, max_reserved=8),
        transfer=TransferConfig(lease_s=LEASE_S, push_timeout_s=2.0),
    )
    return msgspec.structs.replace(built, transfer=msgspec.structs.replace(built.transfer, path=path))


async def outcomes_of(rig: Rig, names: list[str]) -> list[KvrelayError | None]:
    """None for what was served, which is right; what was not failed in a way that a router knows."""
    runs = [rig.run(make_request(name, PROMPT, 6)) for name in names]
    ends = await asyncio.gather(*(run.tokens() for run in runs), return_exceptions=True)
    outcomes: list[KvrelayError | None] = []
    for run, end in zip(runs, ends, strict=True):
        if isinstance(end, KvrelayError):
            outcomes.append(end)
            continue
        assert not isinstance(end, BaseException), end
        check_stream(run)
        outcomes.append(None)
    return outcomes


async def fill_pool(rig: Rig, name: str) -> None:
    """As many requests as the decode pool holds, at once."""
    assert await outcomes_of(rig, [f"{name}-{n}" for n in range(2)]) == [None, None]


@pytest.mark.parametrize("path", SOCKET_PATHS)
@pytest.mark.parametrize("num_rounds", [1, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_a_decode_worker_gets_its_blocks_back_from_a_writer_that_stood_still_and_was_killed(
    path: str, num_rounds: int
) -> None:
    """Known fault 5: after an abort D keeps blocks for a "done" that a dead P never sends."""
    generator = random.Random(num_rounds)
    async with worker_processes(config(path)) as processes:
        decode = await processes.start("decode")
        pid = decode.end.pid
        next_prefill = asyncio.ensure_future(processes.start("prefill"))
        for number in range(num_rounds):
            prefill, next_prefill = await next_prefill, asyncio.ensure_future(processes.start("prefill"))
            run = pair_of(prefill, decode).run(make_request(f"stopped-{number}", PROMPT, 50))
            tokens = asyncio.ensure_future(run.tokens())
            await run.granted.wait()
            await asyncio.sleep(generator.random() * 0.08)
            prefill.signal(signal.SIGSTOP)
            assert (await decode.counts()).free < 20
            tokens.cancel()  # the client leaves
            await asyncio.gather(tokens, return_exceptions=True)
            if generator.random() < 0.5:
                await decode.wait_idle(BACK_S)  # also while it still stands there
            await prefill.kill()
            await decode.wait_idle(BACK_S)
            await fill_pool(pair_of(await asyncio.shield(next_prefill), decode), f"after-{number}")
        await next_prefill
        assert (decode.end.pid, decode.lives) == (pid, True)


@pytest.mark.parametrize("path", SOCKET_PATHS)
@pytest.mark.parametrize("num_rounds", FEW_AND_MANY)
async def test_whoever_is_killed_at_whatever_moment_the_other_gets_every_block_back(path: str, num_rounds: int) -> None:
    generator = random.Random(f"{path} {num_rounds}")
    async with worker_processes(config(path)) as processes:
        prefill, decode = await asyncio.gather(processes.start("prefill"), processes.start("decode"))
        for number in range(num_rounds):
            for role in ("prefill", "decode"):
                victim, other = (prefill, decode) if role == "prefill" else (decode, prefill)
                rig = pair_of(prefill, decode)
                running = asyncio.ensure_future(outcomes_of(rig, [f"{role}-{number}-{n}" for n in range(2)]))
                await asyncio.sleep(generator.random() * LONGEST_S)
                await victim.kill()
                await asyncio.wait_for(running, KNOWN_S)
                await other.wait_idle(BACK_S)
                again = await processes.start(role)
                prefill, decode = (again, decode) if role == "prefill" else (prefill, again)
                await fill_pool(pair_of(prefill, decode), f"after-{role}-{number}")


@pytest.mark.parametrize("path", SOCKET_PATHS)
@pytest.mark.parametrize("num_rounds", FEW_AND_MANY)
async def test_whoever_stands_still_and_goes_on_later_writes_into_nobody_elses_blocks(
    path: str, num_rounds: int
) -> None:
    generator = random.Random(f"{path} {num_rounds}")
    async with worker_processes(config(path)) as processes:
        decode, *prefills = await asyncio.gather(*(processes.start(role) for role in ("decode", "prefill", "prefill")))
        for number in range(num_rounds):
            await _stop_a_writer(generator, prefills, decode, number)
            await _stop_the_receiver(generator, prefills[0], decode, number)


async def _stop_a_writer(
    generator: random.Random, prefills: list[WorkerProcess], decode: WorkerProcess, number: int
) -> None:
    """Its request fails with its lease; the other writer's takes the blocks; then the first goes on."""
    stopped, other = generator.sample(prefills, 2)
    running = asyncio.ensure_future(outcomes_of(pair_of(stopped, decode), [f"still-{number}-{n}" for n in range(2)]))
    await asyncio.sleep(generator.random() * LONGEST_S)
    stopped.signal(signal.SIGSTOP)
    try:
        await asyncio.wait_for(running, KNOWN_S)
        await decode.wait_idle(BACK_S)
        filling = asyncio.ensure_future(fill_pool(pair_of(other, decode), f"instead-{number}"))
        await asyncio.sleep(generator.random() * LONGEST_S / 2)
    finally:
        stopped.signal(signal.SIGCONT)
    await filling
    await stopped.wait_idle(BACK_S)
    await fill_pool(pair_of(stopped, decode), f"again-{number}")


async def _stop_the_receiver(
    generator: random.Random, prefill: WorkerProcess, decode: WorkerProcess, number: int
) -> None:
    """The writer does not wait for it longer than its deadlines, and holds nothing for it."""
    running = asyncio.ensure_future(outcomes_of(pair_of(prefill, decode), [f"deaf-{number}-{n}" for n in range(2)]))
    await asyncio.sleep(generator.random() * LONGEST_S)
    decode.signal(signal.SIGSTOP)
    try:
        await prefill.wait_idle(KNOWN_S + 2.0)
    finally:
        decode.signal(signal.SIGCONT)
    await asyncio.wait_for(running, KNOWN_S)
    await decode.wait_idle(BACK_S)
    await fill_pool(pair_of(prefill, decode), f"heard-{number}")
