"""Pools that fill up: sequences lose their blocks and go on with the very next token; everybody ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from waiting import until
from worker_rig import (
    CALL_S,
    CHUNK_TOKENS,
    Rig,
    Run,
    Times,
    check_stream,
    make_request,
    outcome_of,
    small_config,
    workers,
)

from pd_core.config import Config, DecodeConfig, PrefillConfig
from pd_core.errors import ContextLengthExceeded, KvrelayError, Overloaded, Unavailable
from pd_core.layout import BLOCK_TOKENS
from pd_core.messages import Drain, Drained, WatchStatus, WorkerStatus
from pd_core.request import GenerateRequest
from pd_worker.room_news import SHORTEST_GAP_S

B = BLOCK_TOKENS
SLOW = Times(decode_step_s=0.004)
Start = Callable[[Rig, GenerateRequest], Run]
WAYS: dict[str, Start] = {"handed over": Rig.run, "computed here": Rig.run_both}


def tiny(num_blocks: int = 8, *, prefill_blocks: int = 64, max_batch: int = 8) -> Config:
    return small_config(
        prefill=PrefillConfig(num_blocks=prefill_blocks, chunk_tokens=CHUNK_TOKENS),
        decode=DecodeConfig(num_blocks=num_blocks, max_batch=max_batch, max_reserved=8, prompt_chunk_tokens=2 * B),
    )


def pair() -> tuple[GenerateRequest, GenerateRequest]:
    """Two requests that begin together in eight blocks and cannot end together: six and five are needed."""
    return make_request("old", 30, 66), make_request("young", 20, 60)


async def both_running(rig: Rig, start: Start) -> tuple[list[Run], list[asyncio.Task[KvrelayError | None]]]:
    """Both runs of `pair`, of which the first was admitted first."""
    runs, outcomes = [], []
    for request in pair():
        run = start(rig, request)
        runs.append(run)
        outcomes.append(asyncio.ensure_future(outcome_of(run)))
        await run.granted.wait()
    return runs, outcomes


@pytest.mark.parametrize("way", WAYS)
async def test_the_youngest_loses_its_blocks_and_both_get_their_tokens(way: str) -> None:
    async with workers("inproc", tiny(), times=SLOW) as rig:
        [old, young], outcomes = await both_running(rig, WAYS[way])
        assert await asyncio.gather(*outcomes) == [None, None]
        assert old.preempted == []
        assert len(young.preempted) == 1
        assert 0 < young.preempted[0] < 60
        counters = (await rig.status(rig.to_decode)).counters
        assert counters["preemptions_total"] == 1
        assert counters["recomputed_tokens_total"] == 20 + young.preempted[0] - 1
        local = 50 if way == "computed here" else 0
        assert counters["local_prefill_tokens_total"] == local
        assert counters["requests_cancelled_total"] == counters["handoffs_aborted_total"] == 0
        await rig.wait_idle(within_s=1.0)


@pytest.mark.parametrize("way", WAYS)
async def test_while_one_waits_newcomers_are_refused_and_watchers_hear_of_room_at_once(way: str) -> None:
    async with workers("inproc", tiny(), times=SLOW) as rig:
        _, outcomes = await both_running(rig, WAYS[way])
        await until(lambda: rig.decode.roster.has_waiting, 2.0)
        async with rig.to_decode.stream(WatchStatus(interval_s=30.0), CALL_S) as statuses:
            first: WorkerStatus = await anext(statuses)
            assert (first.num_running, first.num_waiting) == (1, 1)
            for start in WAYS.values():
                failure = await outcome_of(start(rig, make_request("tiny", 1, 1)))
                assert isinstance(failure, Overloaded)
                assert "preempted" in failure.message
            second: WorkerStatus = await asyncio.wait_for(anext(statuses), 2.0)
            assert second.number == first.number + 1
            assert second.num_waiting == 0
        assert await asyncio.gather(*outcomes) == [None, None]
        assert await outcome_of(WAYS[way](rig, make_request("tiny", 1, 1))) is None


async def test_a_watcher_is_told_of_room_that_somebody_was_refused_and_of_no_other() -> None:
    config = small_config(decode=DecodeConfig(num_blocks=6, max_batch=8, max_reserved=8))
    async with (
        workers("inproc", config, times=SLOW) as rig,
        rig.to_decode.stream(WatchStatus(interval_s=0.5), CALL_S) as statuses,
    ):
        await anext(statuses)
        began_s = asyncio.get_running_loop().time()
        for number in range(4):
            assert await outcome_of(rig.run_both(make_request(f"quiet-{number}", 10, 2))) is None
        await anext(statuses)
        assert asyncio.get_running_loop().time() - began_s >= 0.45, "nobody had been refused"
        number_before = (await anext(statuses)).number
        began_s = asyncio.get_running_loop().time()
        for number in range(10):
            long = rig.run_both(make_request(f"long-{number}", 70, 2))
            tokens = asyncio.ensure_future(outcome_of(long))
            await long.granted.wait()
            assert isinstance(await outcome_of(rig.run_both(make_request("refused", 70, 2))), Overloaded)
            assert await tokens is None
        took_s = asyncio.get_running_loop().time() - began_s
        last = await anext(statuses)
        while last.blocks.free < 6:
            last = await anext(statuses)
        assert 1 <= last.number - number_before <= took_s / SHORTEST_GAP_S + 2


PHASES: dict[str, Callable[[Rig, Run], bool]] = {
    "running": lambda rig, run: len(run.made) > 0 and not run.preempted,
    "waiting": lambda rig, run: rig.decode.roster.has_waiting,
    "computing again": lambda rig, run: bool(run.preempted) and not rig.decode.roster.has_waiting,
    "running again": lambda rig, run: bool(run.preempted) and len(run.made) > run.preempted[-1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES)
async def test_one_that_leaves_gives_back_what_it_has_and_the_other_gets_its_tokens(way: str, phase: str) -> None:
    async with workers("inproc", tiny(), times=SLOW) as rig:
        [_, young], [old_outcome, leaver] = await both_running(rig, WAYS[way])
        await until(lambda: PHASES[phase](rig, young), 3.0)
        leaver.cancel()
        await until(lambda: rig.decode.num_running + rig.decode.num_waiting <= 1, 1.0)
        rig.decode.roster.validate()
        assert await old_outcome is None
        await rig.wait_idle(within_s=1.0)
        assert rig.decode.shell.counters.values()["requests_cancelled_total"] == 1


@pytest.mark.parametrize("way", WAYS)
async def test_draining_lets_one_that_was_preempted_end(way: str) -> None:
    async with workers("inproc", tiny(), times=SLOW) as rig:
        _, outcomes = await both_running(rig, WAYS[way])
        await until(lambda: rig.decode.roster.has_waiting, 2.0)
        assert await rig.to_decode.call(Drain(grace_s=5.0), CALL_S) == Drained(num_cut=0)
        assert await asyncio.gather(*outcomes) == [None, None]


@pytest.mark.parametrize("way", WAYS)
async def test_one_that_waits_is_cut_with_an_error_when_the_grace_time_is_over(way: str) -> None:
    async with workers("inproc", tiny(), times=SLOW) as rig:
        _, outcomes = await both_running(rig, WAYS[way])
        await until(lambda: rig.decode.roster.has_waiting, 2.0)
        assert await rig.to_decode.call(Drain(grace_s=0.0), CALL_S) == Drained(num_cut=2)
        assert [type(failure) for failure in await asyncio.gather(*outcomes)] == [Unavailable, Unavailable]
        await rig.wait_idle(within_s=1.0)


async def test_a_ticket_that_comes_while_one_grows_is_not_preempted_and_both_end() -> None:
    async with workers("inproc", tiny(9), times=Times(prefill_chunk_s=0.6, decode_step_s=0.002)) as rig:
        old = rig.run_both(make_request("old", 10, 130))
        outcomes = [asyncio.ensure_future(outcome_of(old))]
        await until(lambda: len(old.made) > 4, 2.0)
        slow = rig.run(make_request("slow", 3 * B, 10))
        outcomes.append(asyncio.ensure_future(outcome_of(slow)))
        await asyncio.wait_for(slow.granted.wait(), 2.0)
        assert await asyncio.gather(*outcomes) == [None, None]
        assert slow.preempted == []
        assert len(old.preempted) == 1, "the ticket held what it needed"


async def patiently(start: Callable[[int], Run]) -> tuple[Run, int]:
    """Runs it until it is not refused any more; how often it was placed."""
    for attempt in range(1, 10_000):
        run = start(attempt)
        failure = await outcome_of(run)
        if failure is None:
            return run, attempt
        assert isinstance(failure, Overloaded), failure
        await asyncio.sleep(0.005)
    raise AssertionError("refused for ever")


@pytest.mark.parametrize("way", WAYS)
async def test_thirty_two_prompts_of_five_blocks_with_three_to_make_pass_pools_of_sixteen(way: str) -> None:
    config = tiny(16, prefill_blocks=16)
    async with workers("inproc", config, times=Times(prefill_chunk_s=0.0005, decode_step_s=0.0005)) as rig:
        num_made = 0.0
        longest_s = last_s = 0.0
        loop = asyncio.get_running_loop()

        async def watch() -> None:
            nonlocal num_made, longest_s, last_s
            last_s = loop.time()
            while True:
                await asyncio.sleep(0.01)
                counters = rig.decode.shell.counters.values()
                if (now_made := counters["decode_tokens_total"]) > num_made:
                    longest_s = max(longest_s, loop.time() - last_s)
                    num_made, last_s = now_made, loop.time()

        watching = asyncio.ensure_future(watch())
        requests = [make_request(f"r{number}", 5 * B, 3 * B) for number in range(32)]
        impossible = WAYS[way](rig, make_request("impossible", 15 * B, B + 1))
        placed = [
            asyncio.ensure_future(patiently(lambda attempt, request=request: type(impossible)(rig, request, attempt)))
            for request in requests
        ]
        await until(lambda: rig.decode.num_running > 0, 2.0)
        began_s = loop.time()
        assert isinstance(await outcome_of(impossible), ContextLengthExceeded)
        assert loop.time() - began_s < 1.0
        runs = await asyncio.gather(*placed)
        watching.cancel()
        for run, _ in runs:
            check_stream(run)
        assert longest_s < 5.0
        await rig.wait_idle()


@pytest.mark.parametrize("path", ["inproc", "tcp"])
async def test_random_requests_through_pools_that_are_far_too_small_end_right_or_leave_nothing(path: str) -> None:
    generator = random.Random(21)
    num_preempted = 0
    config = tiny(10, prefill_blocks=10, max_batch=3)
    async with workers(path, config, times=Times(prefill_chunk_s=0.001, decode_step_s=0.001)) as rig:

        async def one(number: int, patience_s: float | None) -> None:
            nonlocal num_preempted
            request = make_request(f"n{number}", generator.randrange(1, 3 * B), generator.randrange(1, 7 * B))
            kind = generator.choice([Rig.run, Rig.run_both])
            try:
                async with asyncio.timeout(patience_s):
                    run, _ = await patiently(lambda attempt: kind(rig, request, attempt))
            except TimeoutError:
                return
            num_preempted += len(run.preempted)

        waits = [None if number % 3 else generator.random() * 0.3 for number in range(36)]
        await asyncio.gather(*(one(number, wait_s) for number, wait_s in enumerate(waits)))
        await rig.wait_idle()
        assert num_preempted > 0
        rig.decode.roster.validate()
