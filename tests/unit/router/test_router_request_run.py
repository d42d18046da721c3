"""One request's shell, with a clock and streams of its own."""

from __future__ import annotations

import asyncio

import pytest
from run_parts import COMMITTED, DONE, PLACEMENT, STEPS, Host, new_run, prefilling, settle, ticket

from pd_core.errors import Cancelled, DeadlineExceeded, KvrelayError, Overloaded, ProtocolError, WorkerLost
from pd_core.messages import (
    StartDecode,
    TokenMade,
)
from pd_core.request import FinishReason
from pd_core.request_life import RequestState
from router.view import WorkerRef


async def test_tokens_of_both_legs_become_one_stream_and_both_legs_end() -> None:
    host = Host()
    run = await prefilling(host)
    host.streams["p0"].say(TokenMade(0, 7), DONE, None)
    await settle()
    assert [event.token for event in await run.next_events()] == [7]
    host.streams["d0"].say(COMMITTED, TokenMade(0, 7), TokenMade(1, 8), TokenMade(2, 9, FinishReason.LENGTH), None)
    await settle()
    assert [(event.index, event.token) for event in await run.next_events()] == [(1, 8), (2, 9)]
    assert await run.next_events() == []
    assert host.are_all_closed()
    assert sorted(host.over) == [("d0", True), ("p0", True)]
    assert (host.admitted, host.computed) == (["d0"], ["p0"])
    assert (host.num_ended, run.timeline.outcome, run.timeline.path) == (1, "finished", "tcp")


@pytest.mark.parametrize(("wait_s", "is_late"), [(4.9, False), (5.0, True)])
async def test_a_ticket_that_does_not_come_fails_the_request(wait_s: float, is_late: bool) -> None:
    host = Host()
    run = new_run(host)
    run.place(PLACEMENT)
    await settle()
    run.check_time(host.clock_s + wait_s)
    await settle()
    assert (run.life.state is RequestState.FAILED) == is_late
    assert host.are_all_closed() == is_late
    if is_late:
        assert sorted(host.over) == [("d0", True), ("p0", False)]  # the prefill leg was never opened
    run.leave()
    await settle()


@pytest.mark.parametrize(("wait_s", "is_late"), [(61.9, False), (62.0, True)])
async def test_a_first_token_may_take_longer_the_longer_the_prompt(wait_s: float, is_late: bool) -> None:
    host = Host()
    run = await prefilling(host)
    run.check_time(host.clock_s + wait_s)
    assert run.life.is_over == is_late
    if is_late:
        with pytest.raises(DeadlineExceeded):
            await run.next_events()
    run.leave()
    await settle()
    assert host.are_all_closed()


async def test_every_token_sets_the_clock_for_the_next() -> None:
    host = Host()
    run = await prefilling(host)
    for index in range(2):
        host.streams["d0"].say(TokenMade(index, 7))
        await settle()
        host.clock_s += 29.0
        run.check_time(host.clock_s)
        assert not run.life.is_over
    run.check_time(host.clock_s + 1.0)
    assert run.life.state is RequestState.FAILED
    await settle()
    assert host.are_all_closed()


async def test_tokens_that_came_before_a_failure_are_read_before_it() -> None:
    host = Host()
    run = await prefilling(host)
    host.streams["d0"].say(TokenMade(0, 7), WorkerLost("gone"))
    await settle()
    assert len(await run.next_events()) == 1
    with pytest.raises(WorkerLost, match="gone"):
        await run.next_events()


async def test_a_reader_that_waits_hears_of_the_end_at_once() -> None:
    host = Host()
    run = await prefilling(host)
    reader = asyncio.create_task(run.next_events())
    await settle()
    run.leave()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(reader, 1)
    await settle()
    assert host.are_all_closed()
    run.leave()  # once more changes nothing
    run.check_time(host.clock_s + 10_000)
    assert host.num_ended == 1


async def test_a_reader_that_waits_is_woken_by_every_token() -> None:
    host = Host()
    run = await prefilling(host)
    for index in range(3):
        reader = asyncio.create_task(run.next_events())
        await settle()
        host.streams["d0"].say(TokenMade(index, 7))
        await settle()
        assert reader.done()
        assert [event.index for event in reader.result()] == [index]
    run.leave()
    await settle()
    assert host.are_all_closed()


async def test_a_leg_that_is_cancelled_before_it_ran_is_over_too() -> None:
    host = Host()
    run = new_run(host)
    run.place(PLACEMENT)
    run.leave()
    await settle()
    assert sorted(host.over) == [("d0", True), ("p0", False)]
    assert host.streams == {}


async def test_a_refusal_gives_the_turn_back_and_the_next_attempt_is_not_disturbed_by_the_last() -> None:
    host = Host()
    run = new_run(host)
    run.place(PLACEMENT)
    await settle()
    host.streams["d0"].say(Overloaded("no room"))
    await settle()
    assert (run.life.state, host.refused_by) == (RequestState.QUEUED, ["d0"])
    assert sorted(host.over) == [("d0", True), ("p0", False)]
    run.place(PLACEMENT)
    await settle()
    body = host.streams["d0"].body
    assert isinstance(body, StartDecode)
    assert body.attempt == 2
    host.streams["d0"].say(ticket(attempt=2))
    await settle()
    assert run.life.state is RequestState.PREFILLING
    run.leave()
    await settle()
    assert host.are_all_closed()


async def test_a_refusal_by_prefill_gives_the_turn_back_with_both_legs_closed() -> None:
    host = Host()
    run = await prefilling(host)
    first_decode = host.streams["d0"]
    host.streams["p0"].say(Overloaded("no room"))
    await settle()
    assert (run.life.state, host.refused_by) == (RequestState.QUEUED, ["p0"])
    assert host.are_all_closed()
    assert sorted(host.over) == [("d0", True), ("p0", True)]
    run.check_time(host.clock_s + 599)  # no step is under way: only the whole request's deadline counts
    assert not run.life.is_over
    run.place(PLACEMENT)
    await settle()
    assert host.streams["d0"] is not first_decode
    host.streams["d0"].say(ticket(attempt=2))
    await settle()
    host.streams["p0"].say(TokenMade(0, 7))
    await settle()
    assert [event.token for event in await run.next_events()] == [7]
    run.leave()
    await settle()
    assert host.are_all_closed()


async def test_what_a_closed_leg_still_brings_does_not_disturb_the_next_attempt() -> None:
    """The stream turns our cancellation into an error of its own, after the next attempt has begun."""
    host = Host()
    run = await prefilling(host)
    host.streams["d0"].say_when_closed = WorkerLost("too late")
    host.streams["p0"].say(Overloaded("no room"))
    while not host.refused_by:
        await asyncio.sleep(0)
    run.place(PLACEMENT)
    await settle()
    assert run.life.state is RequestState.RESERVING
    run.leave()
    await settle()
    assert host.are_all_closed()


async def test_a_token_of_an_earlier_attempt_that_was_under_way_is_dropped_also_where_it_would_fit() -> None:
    host = Host()
    run = await prefilling(host)
    earlier = host.streams["d0"]
    assert earlier.take is not None
    host.streams["p0"].say(Overloaded("no room"))
    await settle()
    run.place(PLACEMENT)
    await settle()
    host.streams["d0"].say(ticket(attempt=2), TokenMade(0, 7))
    await settle()
    assert not earlier.take(TokenMade(1, 8))
    host.streams["d0"].say(TokenMade(1, 9))
    await settle()
    assert [event.token for event in await run.next_events()] == [7, 9]
    run.leave()
    await settle()
    assert host.are_all_closed()


@pytest.mark.parametrize(("leg", "num_tokens"), [("d0", 0), ("d0", 1), ("p0", 1)])
async def test_a_refusal_when_work_has_begun_is_a_failure(leg: str, num_tokens: int) -> None:
    host = Host()
    run = await prefilling(host)
    host.streams[leg].say(*[TokenMade(0, 7)] * num_tokens, Overloaded("too late", retry_after_s=2))
    await settle()
    assert len(await run.next_events()) == 1 if num_tokens else True
    with pytest.raises(Overloaded):
        await run.next_events()
    assert host.refused_by == []


async def test_a_worker_that_cancels_by_itself_is_lost_to_the_client() -> None:
    host = Host()
    run = await prefilling(host)
    host.streams["p0"].say(Cancelled("the step was cut"))
    await settle()
    with pytest.raises(WorkerLost, match="prefill worker p0 gave the request up: the step was cut"):
        await run.next_events()


async def test_a_ticket_of_another_attempt_is_not_used() -> None:
    host = Host()
    run = new_run(host)
    run.place(PLACEMENT)
    await settle()
    host.streams["d0"].say(ticket(attempt=5))
    await settle()
    assert run.timeline.error == "protocol_error"
    assert "p0" not in host.streams


async def test_a_fault_of_ours_reaches_the_client_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    run = await prefilling(host)
    host.streams["p0"].say(ZeroDivisionError("a detail"))
    await settle()
    with pytest.raises(KvrelayError) as error:
        await run.next_events()
    assert "a detail" not in error.value.message
    assert "a detail" in caplog.text


async def test_only_legs_on_the_lost_worker_fail_the_request() -> None:
    host = Host()
    run = await prefilling(host)
    run.worker_lost(WorkerRef("p0", "an earlier boot"), "was replaced")
    run.worker_lost(WorkerRef("d7", "boot"), "was replaced")
    assert not run.life.is_over
    run.worker_lost(WorkerRef("p0", "boot"), "was replaced")
    with pytest.raises(WorkerLost, match="prefill worker p0 was replaced"):
        await run.next_events()
    await settle()
    assert host.are_all_closed()


async def test_once_the_kv_is_committed_the_prefill_worker_may_be_lost() -> None:
    host = Host()
    run = await prefilling(host)
    host.streams["d0"].say(COMMITTED)
    await settle()
    run.worker_lost(WorkerRef("p0", "boot"), "is gone")
    host.streams["d0"].say(TokenMade(0, 7), TokenMade(1, 8), TokenMade(2, 9, FinishReason.LENGTH), None)
    await settle()
    assert [event.token for event in await run.next_events()] == [7, 8, 9]
    assert host.are_all_closed()  # though p0 has never said a word


async def test_a_leg_that_does_not_say_its_last_word_is_cancelled_after_a_moment() -> None:
    host = Host()
    run = await prefilling(host, max_tokens=1)
    host.streams["p0"].say(TokenMade(0, 7, FinishReason.LENGTH))  # and then no end
    await settle()
    assert run.life.state is RequestState.FINISHED
    assert not host.streams["d0"].is_open  # its ticket is not needed
    assert host.streams["p0"].is_open
    await asyncio.sleep(2 * STEPS.linger_s)
    assert host.are_all_closed()


async def test_a_continuation_counts_on_from_where_the_client_is() -> None:
    host = Host()
    run = new_run(host, first_index=5)
    run.place(PLACEMENT)
    await settle()
    host.streams["d0"].say(ticket())
    await settle()
    host.streams["p0"].say(TokenMade(5, 7))
    await settle()
    assert [event.index for event in await run.next_events()] == [5]
    host.streams["d0"].say(TokenMade(5, 7), TokenMade(6, 8), TokenMade(2, 9))  # the last would fit one without a past
    await settle()
    assert [event.index for event in await run.next_events()] == [6]
    with pytest.raises(ProtocolError, match="out of turn"):
        await run.next_events()
    await settle()
