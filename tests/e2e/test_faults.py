"""Faults that others had in the field, tried on real processes: whoever waits hears of it in time, nothing leaks."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from fake_cluster import (
    ERROR_S,
    FakeCluster,
    expected_ids,
    fake_cluster,
    num_prompt_tokens,
    slow_config,
)

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(120)]

B = 16
LONG = "x" * 300
"""About 320 prompt tokens: ten chunks."""


async def test_streams_of_all_lengths_are_right_and_counted_exactly(tmp_path: Path) -> None:
    """Known fault 2: a prompt that just fills its blocks, or one token more or less, hangs or breaks decode."""
    base = num_prompt_tokens("")
    lengths = [base + 1, *(edge + off for edge in (2 * B, 3 * B, 4 * B) for off in (-1, 0, 1))]
    async with fake_cluster(slow_config(), tmp_path) as fake:
        for again in ("once", "twice"):
            for length in lengths:
                for max_tokens in (1, 2, B + 1):
                    text = "a" * (length - base)
                    outcome = await fake.ask(text, max_tokens)
                    usage = outcome.body["usage"]
                    assert usage["prompt_tokens"] == length, again
                    assert usage["completion_tokens"] == max_tokens
                    assert outcome.body["choices"][0]["token_ids"] == expected_ids(text, max_tokens)
                    assert outcome.took_s < 2.0


async def test_too_long_is_refused_at_once_each_time_also_when_the_pools_are_nearly_full(tmp_path: Path) -> None:
    """Known fault 4: an overlong prompt is dropped by one side and answered from incomplete KV by the other."""
    limit = 16 * B
    config = slow_config(step_s=0.02, decode={"num_blocks": 18}, prefill={"num_blocks": 16, "chunk_tokens": 32})
    base = num_prompt_tokens("")
    async with fake_cluster(config, tmp_path) as fake:
        for stream in (False, True):
            for text, max_tokens in (("a" * (limit + 1 - base), None), ("a", limit), ("a" * (limit - base), None)):
                refused = [await fake.ask(text, max_tokens, stream=stream) for _ in range(2)]
                for outcome in refused:
                    assert outcome.status == 400
                    assert outcome.error is not None
                    assert outcome.error["code"] == "context_length_exceeded"
                    assert outcome.error["param"] in ("messages", "max_tokens")
                    assert outcome.took_s < 1.0
                assert refused[0].error == refused[1].error
        last = await fake.ask("a" * (limit - 1 - base), None)
        assert last.status == 200
        assert last.body["usage"]["completion_tokens"] == 1
        assert last.body["choices"][0]["finish_reason"] == "length"

        running = asyncio.create_task(fake.stream("a", 13 * B))  # nine tenths of the pool
        await asyncio.sleep(0.3)
        outcome = await fake.ask("a" * (limit + 1 - base), None)
        assert outcome.status == 400
        assert outcome.took_s < 1.0
        assert (await running).is_done


@pytest.mark.parametrize("moment", ["before it computes", "after half the blocks"])
async def test_the_only_prefill_worker_is_killed(moment: str, tmp_path: Path) -> None:
    """Known fault 7: prefill fails, and decode and client wait for KV that cannot come.

    Before it computes: another prompt is first, and takes longer than the worker lives.
    """
    async with fake_cluster(slow_config(token_s=0.01), tmp_path) as fake:
        is_early = moment == "before it computes"
        ahead = [asyncio.create_task(fake.ask(f"ahead {LONG}", 20))] if is_early else []
        if is_early:
            await fake.wait_counts("prefill-0", "held")
        whole = asyncio.create_task(fake.ask(LONG, 20))
        streamed = asyncio.create_task(fake.stream(LONG, 20))
        await asyncio.sleep(0.3 if is_early else 1.6)
        assert not any(task.done() for task in ahead)
        killed_s = asyncio.get_running_loop().time()
        fake.signal("prefill-0", signal.SIGKILL)
        for outcome in await asyncio.gather(*ahead, whole, streamed):
            assert outcome.status == 503
            assert outcome.error is not None
            assert outcome.error["message"]
        assert asyncio.get_running_loop().time() - killed_s < ERROR_S
        again = await fake.wait_served()
        assert again.body["choices"][0]["token_ids"] == expected_ids("again", 4)


async def test_the_only_prefill_worker_is_killed_between_its_first_token_and_the_commit(tmp_path: Path) -> None:
    """Known fault 7, after the headers: an error event and no [DONE]. Decode stands still: it cannot commit."""
    async with fake_cluster(slow_config(token_s=0.003), tmp_path) as fake:
        assert (await fake.ask("warm", 4)).status == 200
        has_token = asyncio.Event()
        reading = asyncio.create_task(fake.stream(LONG, 20, on_event=has_token.set))
        await fake.wait_counts("prefill-0", "held")
        fake.signal("decode-0", signal.SIGSTOP)
        try:
            await asyncio.wait_for(has_token.wait(), ERROR_S)
            killed_s = asyncio.get_running_loop().time()
            fake.signal("prefill-0", signal.SIGKILL)
            outcome = await reading
            assert asyncio.get_running_loop().time() - killed_s < ERROR_S
        finally:
            fake.signal("decode-0", signal.SIGCONT)
        assert outcome.status == 200
        assert outcome.error is not None
        assert not outcome.is_done
        assert not outcome.was_cut
        assert outcome.token_ids == expected_ids(LONG, 1)
        again = await fake.wait_served()
        assert again.body["choices"][0]["token_ids"] == expected_ids("again", 4)
        await fake.wait_no_leak()


async def test_the_prefill_worker_falls_silent(tmp_path: Path) -> None:
    """SIGSTOP: no connection breaks. The client hears of it all the same; the worker is killed and another comes."""
    async with fake_cluster(slow_config(token_s=0.01), tmp_path) as fake:
        waiting = asyncio.create_task(fake.ask(LONG, 20))
        await asyncio.sleep(0.5)
        stopped_s = asyncio.get_running_loop().time()
        old = fake.signal("prefill-0", signal.SIGSTOP)
        outcome = await waiting
        assert outcome.status == 503
        assert asyncio.get_running_loop().time() - stopped_s < ERROR_S
        late = await fake.ask("while it is silent", 4)
        assert late.status == 503
        assert late.took_s < ERROR_S, "nobody waits for the silent one to be called dead"
        await fake.wait_served()
        assert fake.cluster.pids["prefill-0"] != old


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_decode_worker_is_lost_in_mid_stream(number: signal.Signals, tmp_path: Path) -> None:
    """Known fault 16: after the headers an error event, no [DONE], never a clean end."""
    async with fake_cluster(slow_config(step_s=0.05), tmp_path) as fake:
        reading = asyncio.create_task(fake.stream("hello", 200))
        await asyncio.sleep(1.0)
        lost_s = asyncio.get_running_loop().time()
        fake.signal("decode-0", number)
        outcome = await reading
        assert asyncio.get_running_loop().time() - lost_s < ERROR_S
        assert outcome.status == 200
        assert outcome.error is not None
        assert not outcome.is_done
        assert outcome.token_ids == expected_ids("hello", len(outcome.token_ids))
        assert len(outcome.token_ids) >= 5
        again = await fake.wait_served()
        assert again.body["choices"][0]["token_ids"] == expected_ids("again", 4)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_worker_whose_loop_has_ended_by_a_fault_of_its_own_is_replaced(name: str, tmp_path: Path) -> None:
    """Its process lives, so no connection breaks by itself: it must not go on as if it were ready."""
    async with fake_cluster(slow_config(token_s=0.002, step_s=0.02), tmp_path) as fake:
        reading = asyncio.create_task(fake.stream(LONG, 200))
        await fake.wait_counts(name, "held")
        old = fake.cluster.pids[name]
        await fake.break_engine(name)
        broken_s = asyncio.get_running_loop().time()
        outcome = await reading
        assert asyncio.get_running_loop().time() - broken_s < ERROR_S
        assert outcome.error is not None
        assert not outcome.is_done
        again = await fake.wait_served()
        assert again.body["choices"][0]["token_ids"] == expected_ids("again", 4)
        assert fake.cluster.pids[name] != old


async def test_clients_leave_in_every_phase(tmp_path: Path) -> None:
    """Queued, in prefill, between prefill and decode, after three tokens: work and KV end with them."""
    config = slow_config(token_s=0.002, step_s=0.02, router={"port": 0, "max_queue": 100})
    async with fake_cluster(config, tmp_path) as fake:
        whole = [asyncio.create_task(fake.ask(f"{LONG} {n}", 500)) for n in range(20)]
        streamed = [asyncio.create_task(fake.stream(f"s{n}", 500, until_tokens=3)) for n in range(20)]
        for n, task in enumerate(whole):
            await asyncio.sleep(0.02 * (n % 7))
            task.cancel()
        for outcome in await asyncio.gather(*streamed):
            assert len(outcome.token_ids) >= 3
        await asyncio.gather(*whole, return_exceptions=True)
        await asyncio.sleep(1.0)
        made = await fake.metric("kvrelay_decode_tokens_total")
        await asyncio.sleep(0.5)
        assert await fake.metric("kvrelay_decode_tokens_total") == made, "somebody still decodes"
        await fake.wait_no_leak(within_s=1.0)
        assert (await fake.ask("again", 4)).status == 200


async def test_two_requests_with_one_client_id_do_not_touch_each_other(tmp_path: Path) -> None:
    """Known fault 12: the client's id as an internal key."""
    headers = {"X-Request-Id": "the same"}
    async with fake_cluster(slow_config(step_s=0.01), tmp_path) as fake:
        first = asyncio.create_task(fake.ask("one", 100, headers=headers))
        second = asyncio.create_task(fake.ask("two", 50, headers=headers))
        await asyncio.sleep(0.3)
        first.cancel()
        outcome = await second
        assert outcome.status == 200
        assert outcome.body["choices"][0]["token_ids"] == expected_ids("two", 50)
        third, fourth = await asyncio.gather(
            fake.ask("three", 50, headers=headers), fake.ask("four", 50, headers=headers)
        )
        assert third.body["choices"][0]["token_ids"] == expected_ids("three", 50)
        assert fourth.body["choices"][0]["token_ids"] == expected_ids("four", 50)
        assert third.body["id"] != fourth.body["id"]


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    config = slow_config(token_s=0.01, router={"port": 0, "max_queue": 2})
    async with fake_cluster(config, tmp_path) as fake:
        asking = [asyncio.create_task(_status_and_retry(fake, n)) for n in range(8)]
        answers = await asyncio.gather(*asking)
        refused = [retry for status, retry in answers if status == 429]
        assert refused
        assert all(retry is not None and int(retry) >= 1 for retry in refused)
        assert {status for status, _ in answers} == {200, 429}


async def _status_and_retry(fake: FakeCluster, n: int) -> tuple[int, str | None]:
    reply = await fake.http.post("/v1/chat/completions", json=fake.body(f"{LONG[:60]} {n}", 4))
    return reply.status_code, reply.headers.get("retry-after")
