"""One step for several requests: who fails, fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from gate_engine import GateEngine

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.request import SamplingParams
from pd_worker.engine_thread import EngineThread
from pd_worker.step_run import PartDone, StepPart, StepRunner


@dataclass
class Bench:
    engine: GateEngine
    runner: StepRunner


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    engine = GateEngine()
    thread = EngineThread(engine, "bench")
    thread.start()
    yield Bench(engine, StepRunner(thread))
    engine.gate.set()
    await thread.close(2.0)


class Request:
    """One whose block table is its number."""

    def __init__(self, number: int, *, draws: bool = True) -> None:
        self.is_over = False
        step = SequenceStep([number], 0, [number], SamplingParams() if draws else None)
        self.part = StepPart(step, lambda: self.is_over)


async def test_a_step_gives_each_its_token(bench: Bench) -> None:
    outcomes = await bench.runner.run([Request(1).part, Request(2, draws=False).part])
    assert [outcome.token for outcome in outcomes if isinstance(outcome, PartDone)] == [7, None]
    assert len(bench.engine.steps) == 1


async def test_one_bad_part_fails_alone_and_the_times_of_the_others_are_of_their_own_step(bench: Bench) -> None:
    bench.engine.bad_tables = [[2]]
    first, bad, last = await bench.runner.run([Request(number).part for number in (1, 2, 3)])
    assert isinstance(first, PartDone)
    assert isinstance(bad, EngineError)
    assert isinstance(last, PartDone)
    assert first.ended_s <= last.began_s
    assert [[step.block_ids[0] for step in steps] for steps in bench.engine.steps] == [[1, 2, 3], [1], [2], [3]]


async def test_a_single_part_that_fails_is_not_tried_again(bench: Bench) -> None:
    bench.engine.bad_tables = [[1]]
    [outcome] = await bench.runner.run([Request(1).part])
    assert isinstance(outcome, EngineError)
    assert len(bench.engine.steps) == 1


async def test_a_step_is_given_up_when_nobody_in_it_is_wanted_and_not_before(bench: Bench) -> None:
    bench.engine.gate.clear()
    requests = [Request(1), Request(2)]
    running = asyncio.ensure_future(bench.runner.run([request.part for request in requests]))
    await bench.engine.until_inside()
    requests[0].is_over = True
    bench.runner.reconsider()
    await asyncio.sleep(0.01)
    assert not bench.engine.was_cancelled
    requests[1].is_over = True
    bench.runner.reconsider()
    assert await running == [None, None]
    assert bench.engine.was_cancelled


async def test_a_decision_about_one_step_does_not_reach_the_next(bench: Bench) -> None:
    bench.engine.gate.clear()
    gone = Request(1)
    running = asyncio.ensure_future(bench.runner.run([gone.part]))
    await bench.engine.until_inside()
    gone.is_over = True
    bench.runner.reconsider()
    await running
    bench.runner.reconsider()  # between two steps
    bench.engine.gate.set()
    [outcome] = await bench.runner.run([Request(2).part])
    assert isinstance(outcome, PartDone)


async def test_who_is_given_up_while_a_failed_step_is_taken_apart_is_not_run(bench: Bench) -> None:
    bench.engine.gate.clear()
    bad, gone, last = Request(1), Request(2), Request(3)
    bench.engine.bad_tables = [[1]]
    running = asyncio.ensure_future(bench.runner.run([bad.part, gone.part, last.part]))
    await bench.engine.until_inside()
    gone.is_over = True
    bench.engine.gate.set()
    of_bad, of_gone, of_last = await running
    assert isinstance(of_bad, EngineError)
    assert of_gone is None
    assert isinstance(of_last, PartDone)


async def test_a_cancelled_caller_returns_when_the_engine_has_left(bench: Bench) -> None:
    bench.engine.gate.clear()
    running = asyncio.ensure_future(bench.runner.run([Request(1).part]))
    await bench.engine.until_inside()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not bench.engine.is_inside.is_set()
