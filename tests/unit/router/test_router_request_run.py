"""One request's shell, with a clock and streams of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from pd_core.errors import Cancelled, DeadlineExceeded, KvrelayError, Overloaded, WorkerLost
from pd_core.messages import (
    ChunkDone,
    HandoffCommitted,
    Preempted,
    PrefillDone,
    PromptAdmitted,
    StartBoth,
    StartDecode,
    StartPrefill,
    TicketGranted,
    TokenMade,
)
from pd_core.request import FinishReason, GenerateRequest, SamplingParams
from pd_core.request_life import RequestState
from pd_core.ticket import Ticket, TicketRef
from router.policy import Placement
from router.request_run import RequestRun
from router.step_clock import StepDeadlines
from router.view import WorkerRef

PLACEMENT = Placement("p0", "d0", "because")
ON_ONE = Placement(None, "d0", "because")
STEPS = StepDeadlines(reserve_s=5, first_token_s=60, prompt_token_s=0.1, next_token_s=30, linger_s=0.05)
COMMITTED = HandoffCommitted("tcp", 1, 100, 0.1)
DONE = PrefillDone([ChunkDone(0, 20, 0.0, 0.1)], 0.1, 0.1, 100)


class Stream:
    """What a worker says on one leg, put in by the test; an exception is raised, None ends it."""

    def __init__(self, body: StartDecode | StartBoth | StartPrefill) -> None:
        self.body = body
        self.is_open = True
        self.say_when_closed: Exception | None = None
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    def say(self, *messages: Any) -> None:
        for message in messages:
            self._said.put_nowait(message)

    async def for_each(self, take: Callable[[Any], bool]) -> None:
        while (message := await self._said.get()) is not None:
            if isinstance(message, Exception):
                raise message
            if not take(message):
                return


class Host:
    """Everything around a run; remembers what it was told. `fail_open`: raised instead of opening a stream."""

    def __init__(self) -> None:
        self.clock_s = 100.0
        self.streams: dict[str, Stream] = {}
        self.over: list[tuple[str, bool]] = []
        self.admitted: list[str] = []
        self.computed: list[str] = []
        self.preempted: list[str] = []
        self.worker_progress_s = 0.0
        self.refused_by: list[str] = []
        self.num_ended = 0
        self.tasks: list[asyncio.Task[None]] = []

    def now_s(self) -> float:
        return self.clock_s

    def ref_of(self, worker: str) -> WorkerRef:
        return WorkerRef(worker, "boot")

    @contextlib.asynccontextmanager
    async def open_stream(self, ref: WorkerRef, body: Any, deadline_s: float) -> AsyncIterator[Stream]:
        assert deadline_s > 0
        stream = self.streams[ref.name] = Stream(body)
        try:
            yield stream
        except asyncio.CancelledError:
            if stream.say_when_closed is not None:
                raise stream.say_when_closed from None
            raise
        finally:
            stream.is_open = False

    def leg_opened(self, task: asyncio.Task[None]) -> None:
        self.tasks.append(task)

    def leg_admitted(self, ref: WorkerRef, work_id: str) -> None:
        self.admitted.append(ref.name)

    def prompt_computed(self, ref: WorkerRef, work_id: str, num_prompt: int) -> None:
        self.computed.append(ref.name)

    def leg_preempted(self, ref: WorkerRef, work_id: str) -> None:
        self.preempted.append(ref.name)

    def leg_resumed(self, ref: WorkerRef, work_id: str) -> None:
        self.preempted.remove(ref.name)

    def progress_s(self, ref: WorkerRef) -> float:
        return self.worker_progress_s

    def leg_over(self, ref: WorkerRef, work_id: str, num_made: int, task: asyncio.Task[None] | None) -> None:
        self.over.append((ref.name, task is not None))

    def turn_given_back(self, run: RequestRun, refused_by: WorkerRef) -> None:
        self.refused_by.append(refused_by.name)

    def token_came(self, gap_s: float | None) -> None:
        pass

    def run_over(self, run: RequestRun) -> None:
        self.num_ended += 1

    def are_all_closed(self) -> bool:
        return all(task.done() for task in self.tasks) and not any(s.is_open for s in self.streams.values())


def new_run(host: Host, max_tokens: int = 3) -> RequestRun:
    request = GenerateRequest("r", list(range(20)), max_tokens, SamplingParams())
    return RequestRun(request, host, arrived_s=host.clock_s, deadline_s=600, steps=STEPS)


def ticket(attempt: int = 1) -> TicketGranted:
    return TicketGranted(Ticket(TicketRef("t", "boot", 1, attempt), "r", 0, [0], 3.0, "127.0.0.1", 1, []))


async def settle() -> None:
    """Lets every task run until it waits for the test."""
    for _ in range(20):
        await asyncio.sleep(0)


async def prefilling(host: Host, max_tokens: int = 3) -> RequestRun:
    """A run whose ticket has come."""
    run = new_run(host, max_tokens)
    run.place(PLACEMENT)
    await settle()
    host.streams["d0"].say(ticket())
    await settle()
    return run


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
    run = new_run(host)
    run.request = msgspec.structs.replace(run.request, first_index=5)
    run.place(PLACEMENT)
    await settle()
    host.streams["d0"].say(ticket())
    await settle()
    host.streams["p0"].say(TokenMade(5, 7))
    await settle()
    assert [event.index for event in await run.next_events()] == [5]
    run.leave()
    await settle()


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
