"""A request through both workers: the right tokens, whatever its size, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from waiting import until
from worker_rig import (
    CHUNK_TOKENS,
    HANDOFF_PATHS,
    Rig,
    Times,
    check_stream,
    expected_tokens,
    make_request,
    short_lease,
    workers,
)

from pd_core.layout import BLOCK_TOKENS
from pd_core.request import continue_request

B = BLOCK_TOKENS
SIZES = [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1]


@pytest_asyncio.fixture(params=HANDOFF_PATHS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with workers(request.param) as rig:
        yield rig


async def test_every_prompt_size_and_length_twice_gives_the_hand_computed_tokens(rig: Rig) -> None:
    for num_prompt in sorted({*SIZES, 3 * CHUNK_TOKENS - 1, 3 * CHUNK_TOKENS, 3 * CHUNK_TOKENS + 1}):
        for max_tokens in (1, 2, B + 1):
            for time in ("first", "second"):
                run = rig.run(make_request(f"{num_prompt}-{max_tokens}-{time}", num_prompt, max_tokens))
                await run.tokens()
                check_stream(run)
    await rig.wait_idle()


async def test_first_and_second_token_show_which_worker_made_them(rig: Rig) -> None:
    request = msgspec.structs.replace(make_request("roles", 3, 2), tokens=[10, 20, 30])
    assert await rig.generate(request) == [60 * 2 % 97, (20 + 30 + 23) * 3 % 97]


async def test_the_messages_of_both_legs_tell_what_the_handoff_was(rig: Rig) -> None:
    run = rig.run(
        make_request("report", 3 * CHUNK_TOKENS + 1, 100)
    )  # so many that prefill's report comes before the last
    await run.tokens()
    assert run.committed is not None
    num_blocks = 3 * CHUNK_TOKENS // B + 1
    assert run.committed.num_blocks == num_blocks
    assert run.committed.num_bytes == num_blocks * 256
    assert run.ticket is not None
    assert run.committed.path == run.ticket.addresses[0].path
    assert run.prefill_done is not None
    assert run.prefill_done.num_bytes == num_blocks * 256
    assert run.prefill_done.push_s > 0
    assert run.prefill_done.transfer_s > 0


async def test_the_prefill_leg_ends_with_a_report_when_the_first_token_is_the_last(rig: Rig) -> None:
    run = rig.run(make_request("one", 2 * CHUNK_TOKENS + 1, 1))
    await run.tokens()
    assert run.committed is None
    assert run.prefill_done is not None
    assert len(run.prefill_done.chunks) == 3
    await rig.wait_idle(within_s=1.0)


async def test_a_stop_token_ends_the_stream_and_is_delivered(rig: Rig) -> None:
    free = make_request("stop", 20, 30)
    expected = expected_tokens(free.tokens, 30)
    for place in (0, 1, 5):
        request = make_request("stop", 20, 30, stop=(expected[place],))
        run = rig.run(msgspec.structs.replace(request, request_id=f"stop-{place}"))
        await run.tokens()
        check_stream(run)
        assert len(run.made) <= place + 1
    await rig.wait_idle(within_s=1.0)


async def test_two_requests_with_the_same_tokens_share_nothing(rig: Rig) -> None:
    first, second = (msgspec.structs.replace(make_request("same", 33, 17), request_id=name) for name in ("a", "b"))
    runs = [rig.run(first), rig.run(second)]
    await asyncio.gather(*(run.tokens() for run in runs))
    for run in runs:
        check_stream(run)
    tickets = [run.ticket for run in runs]
    assert tickets[0] is not None
    assert tickets[1] is not None
    assert not set(tickets[0].block_ids) & set(tickets[1].block_ids)


async def test_requests_that_arrive_at_random_times_do_not_disturb_each_other(rig: Rig) -> None:
    generator = random.Random(5)

    async def later(number: int) -> None:
        await asyncio.sleep(generator.random() * 0.2)
        run = rig.run(make_request(f"r{number}", generator.randrange(1, 100), generator.randrange(1, 20)))
        await run.tokens()
        check_stream(run)

    for _ in range(4):
        await asyncio.gather(*(later(generator.randrange(10**9)) for _ in range(7)))
    await rig.wait_idle()


async def test_a_continuation_goes_on_at_the_next_index(rig: Rig) -> None:
    whole = make_request("whole", 20, 6)
    emitted = expected_tokens(whole.tokens, 3)
    run = rig.run(continue_request(whole, emitted), attempt=2)
    await run.tokens()
    check_stream(run)
    assert run.made[0].index == 3


async def test_the_first_token_does_not_wait_for_the_handoff() -> None:
    async with workers("inproc", times=Times(prefill_chunk_s=0.02)) as rig:
        run = rig.run(make_request("early", 3 * CHUNK_TOKENS, 2))
        tokens = asyncio.ensure_future(run.tokens())
        await run.first_token.wait()
        assert run.committed is None
        await tokens
        check_stream(run)


async def test_a_prefill_that_takes_many_leases_is_slow_but_not_silent() -> None:
    async with workers("tcp", short_lease(0.5), times=Times(prefill_chunk_s=0.8)) as rig:
        run = rig.run(make_request("slow", 2 * CHUNK_TOKENS, 3))
        await run.tokens()
        check_stream(run)


async def test_blocks_are_pushed_while_the_next_chunk_is_computed() -> None:
    async with workers("tcp", times=Times(prefill_chunk_s=0.15)) as rig:
        run = rig.run(make_request("overlap", 3 * CHUNK_TOKENS, 2))
        tokens = asyncio.ensure_future(run.tokens())
        await run.granted.wait()
        first_chunk_bytes = CHUNK_TOKENS // B * 256
        await until(lambda: rig.decode.extra_counters()["kv_bytes_received_total"] >= first_chunk_bytes, 2.0)
        assert rig.prefill.num_running == 1
        assert not run.made
        await tokens
        check_stream(run)


async def test_the_counters_add_up(rig: Rig) -> None:
    for number in range(3):
        await rig.generate(make_request(f"c{number}", 33, 5))
    await rig.wait_idle()
    prefill, decode = await rig.status(rig.to_prefill), await rig.status(rig.to_decode)
    assert prefill.counters["prefill_tokens_total"] == 3 * 33
    assert prefill.counters["kv_bytes_sent_total"] == decode.counters["kv_bytes_received_total"] == 3 * 3 * 256
    assert decode.counters["decode_tokens_total"] == 3 * 4
    assert prefill.counters["handoffs_committed_total"] == decode.counters["handoffs_committed_total"] == 3
    assert prefill.counters["handoffs_aborted_total"] == decode.counters["handoffs_aborted_total"] == 0
    assert prefill.counters["steps_total"] == 3 * 2
    assert prefill.counters["requests_cancelled_total"] == decode.counters["requests_cancelled_total"] == 0
    assert (prefill.num_running, prefill.num_waiting, decode.num_running, decode.num_waiting) == (0, 0, 0, 0)


async def test_a_request_whose_first_token_is_its_last_is_neither_cancelled_nor_aborted(rig: Rig) -> None:
    """The router closes the decode leg then as it does when its client leaves."""
    for num_prompt in (5, 3 * CHUNK_TOKENS + 1):
        await rig.generate(make_request(f"by-length-{num_prompt}", num_prompt, 1))
        stopped = make_request(f"by-stop-{num_prompt}", num_prompt, 9)
        first = expected_tokens(stopped.tokens, 1)
        assert await rig.generate(msgspec.structs.replace(stopped, stop_token_ids=first)) == first
    await rig.wait_idle(within_s=1.0)
    for client in (rig.to_prefill, rig.to_decode):
        counters = (await rig.status(client)).counters
        assert counters["requests_cancelled_total"] == counters["handoffs_aborted_total"] == 0
