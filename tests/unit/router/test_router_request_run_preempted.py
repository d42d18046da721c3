"""One request's shell: both phases on one worker, preemption, and what is written down of it."""

from __future__ import annotations

import msgspec
import pytest
from run_parts import COMMITTED, DONE, ON_ONE, PLACEMENT, STEPS, Host, new_run, prefilling, settle, ticket

from pd_core.errors import Overloaded
from pd_core.messages import (
    Preempted,
    PromptAdmitted,
    StartBoth,
    TokenMade,
)
from pd_core.request import FinishReason
from pd_core.request_life import RequestState
from router.request_run import RequestRun


async def both_on_one(host: Host, max_tokens: int = 3) -> RequestRun:
    """A run whose prompt decode computes."""
    run = new_run(host, max_tokens)
    run.place(ON_ONE)
    await settle()
    host.streams["d0"].say(PromptAdmitted())
    await settle()
    return run


async def test_one_worker_may_do_both_phases() -> None:
    host = Host()
    run = await both_on_one(host)
    body = host.streams["d0"].body
    assert isinstance(body, StartBoth)
    assert body.attempt == 1
    assert (host.admitted, host.computed) == (["d0"], [])
    host.streams["d0"].say(*[TokenMade(index, 7) for index in range(2)], TokenMade(2, 9, FinishReason.LENGTH), None)
    await settle()
    assert [event.token for event in await run.next_events()] == [7, 7, 9]
    assert await run.next_events() == []
    assert (host.computed, host.over, host.are_all_closed()) == (["d0"], [("d0", True)], True)
    timeline = run.timeline
    assert (timeline.outcome, timeline.prefill, timeline.path, timeline.num_chunks) == ("finished", None, None, None)


async def test_a_worker_of_both_phases_that_has_no_room_gives_the_turn_back() -> None:
    host = Host()
    run = new_run(host)
    run.place(ON_ONE)
    await settle()
    host.streams["d0"].say(Overloaded("no room"))
    await settle()
    assert (run.life.state, host.refused_by, host.over) == (RequestState.QUEUED, ["d0"], [("d0", True)])
    run.leave()


@pytest.mark.parametrize("message", [ticket(), COMMITTED])
async def test_a_message_of_a_handoff_has_no_place_where_there_is_none(message: msgspec.Struct) -> None:
    host = Host()
    run = await both_on_one(host)
    host.streams["d0"].say(message)
    await settle()
    assert run.timeline.error == "protocol_error"
    assert host.are_all_closed()


async def test_a_preempted_stream_goes_on_and_is_not_late_as_long_as_its_worker_gets_on() -> None:
    host = Host()
    run = await both_on_one(host)
    host.streams["d0"].say(TokenMade(0, 7), Preempted(1))
    await settle()
    assert host.preempted == ["d0"]
    for _ in range(5):
        host.clock_s += STEPS.next_token_s
        host.worker_progress_s = host.clock_s - 1
        run.check_time(host.clock_s)
        assert not run.life.is_over
    host.streams["d0"].say(TokenMade(1, 8), TokenMade(2, 9, FinishReason.LENGTH), None)
    await settle()
    assert [event.token for event in await run.next_events()] == [7, 8, 9]
    assert host.preempted == []
    assert (run.timeline.num_preemptions, run.timeline.preempted_s) == (1, 100.0)


async def test_a_late_copy_of_the_first_token_does_not_end_a_preemption() -> None:
    host = Host()
    run = await prefilling(host)
    host.streams["d0"].say(COMMITTED, TokenMade(0, 7), Preempted(1))
    await settle()
    host.streams["p0"].say(TokenMade(0, 7), DONE, None)
    await settle()
    assert host.preempted == ["d0"]
    host.clock_s += STEPS.next_token_s
    host.worker_progress_s = host.clock_s
    run.check_time(host.clock_s)
    assert not run.life.is_over
    host.streams["d0"].say(TokenMade(1, 8))
    await settle()
    assert host.preempted == []
    run.leave()
    await settle()


async def test_a_preempted_stream_is_late_when_its_worker_stands_still_or_its_own_time_is_over() -> None:
    for progress_s, wait_s in ((100.0, STEPS.next_token_s), (1e9, 600.0)):
        host = Host()
        run = await both_on_one(host)
        host.streams["d0"].say(TokenMade(0, 7), Preempted(1))
        await settle()
        host.worker_progress_s = progress_s
        run.check_time(host.clock_s + wait_s - 0.1)
        assert not run.life.is_over
        run.check_time(host.clock_s + wait_s)
        assert run.life.state is RequestState.FAILED
        await settle()
        assert host.are_all_closed()


async def test_what_prefill_and_decode_report_is_written_down_also_after_the_last_token() -> None:
    host = Host()
    run = await prefilling(host, max_tokens=1)
    host.streams["p0"].say(TokenMade(0, 7, FinishReason.LENGTH), DONE, None)
    await settle()
    assert run.timeline.chunks == DONE.chunks
    run = await prefilling(host, max_tokens=2)
    host.streams["d0"].say(COMMITTED, TokenMade(0, 7), TokenMade(1, 7, FinishReason.LENGTH), None)
    await settle()
    assert (run.timeline.path, run.timeline.num_kv_blocks, run.timeline.handoff_s) == ("tcp", 1, 0.1)
    assert run.timeline.exposed_s == 0.0


async def test_every_placement_is_kept_with_its_reason_and_only_so_many() -> None:
    host = Host()
    run = new_run(host)
    for number in range(20):
        run.place(msgspec.structs.replace(PLACEMENT, reason=f"reason {number}"))
        await settle()
        host.streams["d0"].say(Overloaded("no room"))
        await settle()
    notes = run.timeline.placements
    assert (len(notes), notes[0].reason, notes[-1].reason) == (16, "reason 0", "reason 19")
    assert run.timeline.num_attempts == 20
    run.leave()
