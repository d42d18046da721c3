"""What the workers refuse, when they are full, how they say how they are, and how they stop."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from leaks import no_leaks
from waiting import until
from worker_rig import (
    CALL_S,
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    HANDOFF_PATHS,
    Times,
    check_stream,
    expected_tokens,
    failure_of,
    make_request,
    small_config,
    workers,
)

from pd_core.config import DecodeConfig, PrefillConfig
from pd_core.errors import ContextLengthExceeded, InvalidRequest, KvrelayError, Overloaded, Unavailable
from pd_core.messages import Drain, Drained, ReadLedger, WatchStatus, WorkerState
from pd_core.request import FinishReason

SLOW = Times(prefill_chunk_s=0.02, decode_step_s=0.02)


async def test_a_full_pool_refuses_and_serves_again_when_there_is_room() -> None:
    config = small_config(decode=DecodeConfig(num_blocks=6, max_batch=8, max_reserved=8))
    async with workers("tcp", config, times=SLOW) as rig:
        first = rig.run(make_request("first", 33, 32))  # 33 + 31 positions: four blocks for as long as it runs
        tokens = asyncio.ensure_future(first.tokens())
        await first.granted.wait()
        refusal = await failure_of(rig, make_request("second", 33, 1))
        assert isinstance(refusal, Overloaded)
        assert refusal.retry_after_s == 1.0
        assert await failure_of(rig, make_request("small", 16, 17)) is None
        await tokens
        check_stream(first)
        assert await failure_of(rig, make_request("second", 33, 1), attempt=2) is None
        await rig.wait_idle(within_s=1.0)


async def test_more_open_tickets_than_allowed_are_refused() -> None:
    config = small_config(decode=DecodeConfig(num_blocks=64, max_reserved=2))
    async with workers("tcp", config) as rig:
        runs = [rig.run(make_request(f"r{number}", 4, 4)) for number in range(2)]
        legs = [asyncio.ensure_future(run._decode_leg()) for run in runs]
        for run in runs:
            await run.granted.wait()
        assert isinstance(await failure_of(rig, make_request("third", 4, 4)), Overloaded)
        for leg in legs:
            leg.cancel()
        await rig.wait_idle(within_s=1.0)
        assert await failure_of(rig, make_request("third", 4, 4), attempt=2) is None


async def test_a_prefill_worker_refuses_more_prompts_than_it_may_run_and_the_ticket_comes_back() -> None:
    config = small_config(prefill=PrefillConfig(num_blocks=64, chunk_tokens=CHUNK_TOKENS, max_running=1))
    async with workers("tcp", config, times=SLOW) as rig:
        first = rig.run(make_request("first", 3 * CHUNK_TOKENS, 2))
        tokens = asyncio.ensure_future(first.tokens())
        await until(lambda: rig.prefill.num_running == 1, 2.0)
        assert isinstance(await failure_of(rig, make_request("second", 4, 4)), Overloaded)
        await tokens
        await rig.wait_idle(within_s=1.0)


async def test_a_full_prefill_pool_refuses_too() -> None:
    config = small_config(prefill=PrefillConfig(num_blocks=6, chunk_tokens=CHUNK_TOKENS, max_running=4))
    async with workers("tcp", config, times=SLOW) as rig:
        first = rig.run(make_request("first", 5 * 16, 2))
        tokens = asyncio.ensure_future(first.tokens())
        await until(lambda: rig.prefill.num_running == 1, 2.0)
        assert isinstance(await failure_of(rig, make_request("second", 17, 4)), Overloaded)
        await tokens
        assert await failure_of(rig, make_request("second", 17, 4), attempt=2) is None


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(60, 5, "max_tokens"), (63, 2, "max_tokens"), (64, 1, "messages"), (500, 1, "messages"), (1, 64, "max_tokens")],
)
async def test_what_no_pool_of_this_size_can_ever_hold_is_a_clients_error(
    num_prompt: int, max_tokens: int, param: str
) -> None:
    config = small_config(decode=DecodeConfig(num_blocks=4))
    async with workers("tcp", config) as rig:
        for _ in range(2):
            failure = await failure_of(rig, make_request("big", num_prompt, max_tokens))
            assert isinstance(failure, ContextLengthExceeded)
            assert failure.param == param
            assert "64" in failure.message
        assert rig.is_idle


async def test_a_request_of_exactly_the_limit_is_served() -> None:
    config = small_config(decode=DecodeConfig(num_blocks=4))
    async with workers("tcp", config) as rig:
        assert await failure_of(rig, make_request("tight", 60, 4)) is None
        assert await failure_of(rig, make_request("tighter", 63, 1)) is None


async def test_the_context_limits_where_the_pool_does_not() -> None:
    async with workers("tcp") as rig:
        over = await failure_of(rig, make_request("over", CONTEXT_TOKENS - 1, 2))
        assert isinstance(over, ContextLengthExceeded)
        assert await failure_of(rig, make_request("exact", CONTEXT_TOKENS - 1, 1)) is None


async def test_a_prompt_larger_than_the_prefill_pool_is_a_clients_error() -> None:
    config = small_config(prefill=PrefillConfig(num_blocks=2, chunk_tokens=CHUNK_TOKENS))
    async with workers("tcp", config) as rig:
        failure = await failure_of(rig, make_request("big", 33, 1))
        assert isinstance(failure, ContextLengthExceeded)
        assert failure.param == "messages"
        await rig.wait_idle(within_s=1.0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tokens": []}, "messages"),
        ({"tokens": [1, 97]}, "messages"),
        ({"tokens": [-1]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_requests_that_no_engine_could_run_are_refused(change: dict[str, object], param: str) -> None:
    async with workers("tcp") as rig:
        failure = await failure_of(rig, msgspec.structs.replace(make_request("bad", 3, 3), **change))
        assert isinstance(failure, InvalidRequest)
        assert failure.param == param
        assert rig.is_idle


async def test_one_attempt_cannot_be_here_twice() -> None:
    async with workers("tcp", times=SLOW) as rig:
        first = rig.run(make_request("twin", 20, 20))
        tokens = asyncio.ensure_future(first.tokens())
        await first.granted.wait()
        assert isinstance(await failure_of(rig, make_request("twin", 5, 5)), InvalidRequest)
        await tokens
        check_stream(first)
        await rig.wait_idle(within_s=1.0)


async def test_more_sequences_than_a_batch_holds_take_turns_and_all_end() -> None:
    config = small_config(decode=DecodeConfig(num_blocks=64, max_batch=2, max_reserved=16))
    async with workers("tcp", config) as rig:
        failures = await asyncio.gather(*(failure_of(rig, make_request(f"r{n}", 10, 12)) for n in range(7)))
        assert failures == [None] * 7


async def test_heartbeats_are_numbered_and_go_on_while_the_engine_is_busy() -> None:
    async with workers("tcp", times=Times(prefill_chunk_s=0.4)) as rig:
        run = rig.run(make_request("busy", 20, 2))
        tokens = asyncio.ensure_future(run.tokens())
        await until(lambda: rig.prefill.num_running == 1, 2.0)
        statuses = []
        async with rig.to_prefill.stream(WatchStatus(interval_s=0.02), CALL_S) as beats:
            async for status in beats:
                statuses.append(status)
                if len(statuses) == 6:
                    break
        assert [status.number for status in statuses] == list(range(statuses[0].number, statuses[0].number + 6))
        status = statuses[-1]
        assert (status.name, status.role, status.incarnation) == ("prefill-0", "prefill", "prefill-boot")
        assert (status.num_running, status.blocks.held, status.state) == (1, 2, WorkerState.READY)
        assert (status.context_tokens, status.pool_tokens) == (CONTEXT_TOKENS, 64 * 16)
        assert status.detail["invariance"] == "bit-exact"
        await tokens


async def test_an_interval_that_is_none_is_refused() -> None:
    async with workers("tcp") as rig:
        with pytest.raises(InvalidRequest):
            async with rig.to_decode.stream(WatchStatus(interval_s=0.0), CALL_S) as beats:
                await anext(beats)


async def test_the_ledger_report_names_who_holds_what() -> None:
    async with workers("tcp", times=SLOW) as rig:
        run = rig.run(make_request("named", 33, 60))
        tokens = asyncio.ensure_future(run.tokens())
        await run.granted.wait()
        waiting = (await rig.to_decode.call(ReadLedger(), CALL_S)).report
        assert waiting.reservations == {"1": 3}
        assert waiting.holders == {}
        await until(lambda: len(run.made) > 16, 2.0)
        running = (await rig.to_decode.call(ReadLedger(), CALL_S)).report
        assert running.holders == {"named/1": 4}, "it has grown by one"
        assert running.reservations == {}
        tokens.cancel()
        await rig.wait_idle(within_s=1.0)


async def test_draining_lets_running_requests_end_and_takes_no_new_ones() -> None:
    async with workers("tcp", times=SLOW) as rig:
        run = rig.run(make_request("last", 20, 20))
        tokens = asyncio.ensure_future(run.tokens())
        await until(lambda: run.committed is not None, 2.0)
        draining = asyncio.ensure_future(rig.to_decode.call(Drain(grace_s=5.0), CALL_S))
        await asyncio.sleep(0.02)
        assert isinstance(await failure_of(rig, make_request("late", 4, 4)), Unavailable)
        assert (await rig.status(rig.to_decode)).state is WorkerState.DRAINING
        assert await draining == Drained(num_cut=0)
        await tokens
        check_stream(run)


async def test_what_still_runs_after_the_grace_time_is_cut_with_an_error() -> None:
    async with workers("tcp", times=SLOW) as rig:
        run = rig.run(make_request("long", 20, 400))
        tokens = asyncio.ensure_future(run.tokens())
        await until(lambda: len(run.made) > 2, 2.0)
        assert await rig.to_decode.call(Drain(grace_s=0.1), CALL_S) == Drained(num_cut=1)
        with pytest.raises(Unavailable, match="shutting down"):
            await tokens
        await rig.wait_idle(within_s=1.0)


@pytest.mark.parametrize("path", HANDOFF_PATHS)
async def test_stopped_in_the_middle_of_everything_the_workers_leave_nothing_behind(path: str) -> None:
    async with no_leaks(), workers(path, times=SLOW) as rig:
        runs = [rig.run(make_request(f"r{number}", 40 * number + 5, 50)) for number in range(4)]
        tokens = [asyncio.ensure_future(run.tokens()) for run in runs]
        await until(lambda: bool(runs[0].made), 2.0)
        await asyncio.gather(rig.prefill.stop(0.0), rig.decode.stop(0.0))
        outcomes = await asyncio.gather(*tokens, return_exceptions=True)
        assert all(isinstance(outcome, KvrelayError) for outcome in outcomes), outcomes
        assert rig.is_idle


async def test_a_worker_that_served_leaves_nothing_behind() -> None:
    async with no_leaks(), workers("tcp") as rig:
        for number in range(3):
            await rig.generate(make_request(f"r{number}", 40, 3))


async def test_the_finish_reason_is_stop_when_the_last_allowed_token_is_a_stop_token() -> None:
    async with workers("inproc") as rig:
        free = make_request("edge", 9, 4)
        last = expected_tokens(free.tokens, 4)[-1]
        run = rig.run(msgspec.structs.replace(free, stop_token_ids=[last]))
        await run.tokens()
        assert run.made[-1].finish is FinishReason.STOP
