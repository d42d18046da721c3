"""The engine's thread: the event loop goes on, a cancelled caller waits until the engine has left the step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from gate_engine import GateEngine

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, EngineError, InvalidTransition
from pd_core.request import SamplingParams
from pd_engine.steps import never
from pd_worker.engine_thread import EngineThread

STEP = [SequenceStep([1], 0, [0], SamplingParams())]


@pytest_asyncio.fixture
async def engine() -> GateEngine:
    return GateEngine()


@pytest_asyncio.fixture
async def thread(engine: GateEngine) -> AsyncIterator[EngineThread]:
    thread = EngineThread(engine, "test")
    thread.start()
    yield thread
    engine.gate.set()
    await thread.close(2.0)
    assert not any(other.name == "test-engine" for other in threading.enumerate())


async def test_a_step_gives_the_engines_tokens_and_is_counted(thread: EngineThread) -> None:
    assert await thread.step(STEP, never) == [7]
    assert thread.num_steps == 1
    assert not thread.is_busy


async def test_the_event_loop_goes_on_during_a_step(thread: EngineThread, engine: GateEngine) -> None:
    engine.gate.clear()
    step = asyncio.ensure_future(thread.step(STEP, never))
    await engine.until_inside()
    assert thread.is_busy
    engine.gate.set()
    assert await step == [7]


async def test_a_second_step_meanwhile_is_refused(thread: EngineThread, engine: GateEngine) -> None:
    engine.gate.clear()
    step = asyncio.ensure_future(thread.step(STEP, never))
    await engine.until_inside()
    with pytest.raises(InvalidTransition, match="one step at a time"):
        await thread.step(STEP, never)
    engine.gate.set()
    assert await step == [7]


async def test_the_callers_flag_stops_the_step(thread: EngineThread, engine: GateEngine) -> None:
    engine.gate.clear()
    flag = threading.Event()
    step = asyncio.ensure_future(thread.step(STEP, flag.is_set))
    await engine.until_inside()
    flag.set()
    with pytest.raises(Cancelled):
        await step
    engine.gate.set()
    assert await thread.step(STEP, never) == [7]


@pytest.mark.parametrize("hears_cancelled", [True, False])
async def test_a_cancelled_caller_returns_only_when_the_engine_has_left(
    thread: EngineThread, engine: GateEngine, hears_cancelled: bool
) -> None:
    engine.gate.clear()
    engine.hears_cancelled = hears_cancelled
    step = asyncio.ensure_future(thread.step(STEP, never))
    await engine.until_inside()
    step.cancel()
    if not hears_cancelled:
        for _ in range(3):  # however often it is cancelled
            await asyncio.sleep(0.005)
            step.cancel()
            assert not step.done()
        engine.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert engine.was_cancelled
    assert not engine.is_inside.is_set()


async def test_errors_of_the_engine_keep_their_class_and_surprises_become_engine_errors(
    thread: EngineThread, engine: GateEngine
) -> None:
    engine.failure = EngineError("a bad id")
    with pytest.raises(EngineError, match="a bad id"):
        await thread.step(STEP, never)
    engine.failure = ZeroDivisionError("oops")
    with pytest.raises(EngineError, match="ZeroDivisionError: oops"):
        await thread.step(STEP, never)
    engine.failure = None
    assert await thread.step(STEP, never) == [7]


async def test_closing_stops_the_step_that_is_under_way(thread: EngineThread, engine: GateEngine) -> None:
    engine.gate.clear()
    step = asyncio.ensure_future(thread.step(STEP, never))
    await engine.until_inside()
    await thread.close(2.0)
    with pytest.raises(Cancelled):
        await step
    with pytest.raises(InvalidTransition):
        await thread.step(STEP, never)


async def test_an_engine_that_does_not_leave_its_step_is_reported(thread: EngineThread, engine: GateEngine) -> None:
    engine.gate.clear()
    engine.hears_cancelled = False
    step = asyncio.ensure_future(thread.step(STEP, never))
    await engine.until_inside()
    with pytest.raises(EngineError, match="still inside a step"):
        await thread.close(0.02)
    engine.gate.set()
    await step


async def test_a_thread_that_was_never_started_is_closed_already() -> None:
    await EngineThread(GateEngine(), "idle").close(1.0)
