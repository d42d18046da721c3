"""The supervisor's shell with seats that are no processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from waiting import until

from cluster.policy import SeatLimits, SeatState
from cluster.supervisor import Supervisor
from pd_core.errors import KvrelayError, ModelError, Unavailable, WorkerLost
from pd_core.messages import WorkerEndpoint

LIMITS = SeatLimits(suspect_s=0.1, dead_s=0.3, start_deadline_s=0.5, max_gap_s=5.0, first_delay_s=0.01)


class FakeSeat:
    """A boot is a future that ends when the test says so. `story` is what was asked of it, in order."""

    def __init__(self, name: str, role: str = "prefill") -> None:
        self.name = name
        self.role = role
        self.pid: int | None = None
        self.incarnation = ""
        self.endpoint: WorkerEndpoint | None = None
        self.story: list[str] = []
        self.launch_errors: list[Exception] = []
        self.kill_errors: list[Exception] = []
        self.watch_error: Exception | None = None
        self.is_slow = False
        self.heart_beats = True
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def launch(self) -> None:
        self.story.append("launch")
        if self.is_slow:
            await asyncio.sleep(3600)
        if self.launch_errors:
            raise self.launch_errors.pop(0)
        boot = self.story.count("launch")
        self.pid, self.incarnation = boot, f"{self.name}/{boot}"
        self.exited = asyncio.get_running_loop().create_future()
        self.endpoint = WorkerEndpoint(self.name, self.role, "127.0.0.1", 1, self.incarnation, boot)

    async def wait_exit(self) -> str:
        return await asyncio.shield(self.exited)

    async def watch(self, on_heard: Callable[[], None]) -> None:
        while True:
            if self.watch_error is not None:
                raise self.watch_error
            if self.heart_beats:
                on_heard()
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        self.story.append("kill")
        if self.kill_errors:
            raise self.kill_errors.pop(0)
        self.heart_beats = True

    async def stop(self, grace_s: float) -> None:
        self.story.append("stop")


class FakeRouter(FakeSeat):
    def __init__(self) -> None:
        super().__init__("router", "router")
        self.told: list[list[str]] = []
        self.tell_errors: list[Exception] = []

    async def tell_workers(self, endpoints: list[WorkerEndpoint]) -> None:
        if self.tell_errors:
            raise self.tell_errors.pop(0)
        self.told.append([endpoint.incarnation for endpoint in endpoints])


class Fleet:
    def __init__(self) -> None:
        self.router = FakeRouter()
        self.prefill, self.decode = FakeSeat("prefill-0"), FakeSeat("decode-0", "decode")
        self.started: list[str] = []
        self.supervisor = Supervisor(self.router, [self.prefill, self.decode], LIMITS)

    async def start(self) -> None:
        await self.supervisor.start(self.started.append)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    await made.supervisor.end()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_start_fills_all_seats_and_ends_when_the_router_knows_the_workers(fleet):
    await fleet.start()
    assert sorted(fleet.started) == ["decode-0", "prefill-0", "router"]
    assert fleet.router.told[-1] == ["prefill-0/1", "decode-0/1"]


async def test_an_exit_is_told_fenced_and_followed_by_a_new_boot_that_is_told_too(fleet):
    await fleet.start()
    fleet.decode.exited.set_result("process 7 died")
    await until(lambda: fleet.router.told[-1] == ["prefill-0/1", "decode-0/2"])
    assert ["prefill-0/1"] in fleet.router.told
    assert fleet.decode.story == ["launch", "kill", "launch"]
    assert fleet.prefill.story == ["launch"]


async def test_silence_is_death(fleet):
    await fleet.start()
    fleet.prefill.heart_beats = False
    await until(lambda: fleet.supervisor.states()["prefill-0"] is SeatState.SUSPECT)
    assert fleet.router.told[-1] == ["prefill-0/1", "decode-0/1"]
    await until(lambda: fleet.router.told[-1] == ["prefill-0/2", "decode-0/1"])


async def test_nothing_takes_the_place_of_a_process_that_does_not_end(fleet, monkeypatch):
    monkeypatch.setattr("cluster.keeper.KILL_RETRY_S", 0.05)
    await fleet.start()
    fleet.decode.kill_errors = [WorkerLost("goes on"), WorkerLost("goes on")]
    fleet.decode.exited.set_result("process 7 died")
    await until(lambda: fleet.decode.story.count("launch") == 2)
    assert fleet.decode.story == ["launch", "kill", "kill", "kill", "launch"]


async def test_a_later_boot_that_fails_is_tried_again(fleet):
    await fleet.start()
    fleet.decode.launch_errors = [OSError("no memory"), Unavailable("not yet")]
    fleet.decode.exited.set_result("process 7 died")
    await until(lambda: fleet.router.told[-1] == ["prefill-0/1", "decode-0/4"])
    assert fleet.decode.story == ["launch", "kill"] * 3 + ["launch"]


async def test_a_new_router_is_told_the_workers(fleet):
    await fleet.start()
    fleet.router.told.clear()
    fleet.router.exited.set_result("process 8 died")
    await until(lambda: fleet.router.told == [["prefill-0/1", "decode-0/1"]])
    assert fleet.router.incarnation == "router/2"


async def test_a_router_that_did_not_understand_is_told_again(fleet, monkeypatch):
    monkeypatch.setattr("cluster.supervisor.RETELL_S", 0.02)
    fleet.router.tell_errors = [Unavailable("busy"), Unavailable("busy")]
    await fleet.start()
    assert fleet.router.told[-1] == ["prefill-0/1", "decode-0/1"]
    assert fleet.router.tell_errors == []


async def test_a_first_boot_that_fails_ends_the_start_with_its_own_error(fleet):
    fleet.decode.launch_errors = [ModelError("the weights are torn")]
    with pytest.raises(ModelError, match="the weights are torn"):
        await fleet.start()


async def test_a_first_boot_that_hangs_ends_the_start_at_its_deadline(fleet):
    fleet.decode.is_slow = True
    with pytest.raises(Unavailable, match=r"decode-0: not started within 0\.5 s"):
        await fleet.start()


async def test_a_teller_that_breaks_down_during_the_start_ends_it_at_once(fleet):
    fleet.router.tell_errors = [ZeroDivisionError("a fault")]
    with pytest.raises(KvrelayError, match="supervision failed: ZeroDivisionError: a fault"):
        await asyncio.wait_for(fleet.start(), 2)


async def test_a_teller_that_breaks_down_later_is_an_error_and_not_silence(fleet):
    await fleet.start()
    running = asyncio.create_task(fleet.supervisor.run_until_failed())
    fleet.router.tell_errors = [ZeroDivisionError("a fault")]
    fleet.decode.exited.set_result("process 7 died")
    with pytest.raises(KvrelayError, match="supervision failed: ZeroDivisionError: a fault"):
        await asyncio.wait_for(running, 2)


async def test_a_watch_over_a_seat_that_breaks_down_is_an_error_and_not_silence(fleet):
    await fleet.start()
    running = asyncio.create_task(fleet.supervisor.run_until_failed())
    fleet.prefill.watch_error = ZeroDivisionError("a fault")
    with pytest.raises(KvrelayError, match="supervision failed: ZeroDivisionError: a fault"):
        await asyncio.wait_for(running, 2)


async def test_after_the_end_nothing_is_started_again(fleet):
    await fleet.start()
    await fleet.supervisor.end()
    fleet.decode.exited.set_result("stopped")
    await asyncio.sleep(0.1)
    assert fleet.decode.story == ["launch"]
