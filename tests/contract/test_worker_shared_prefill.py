"""Several prompts on one prefill worker: they share steps, a long one stops nobody, and nobody fails for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from waiting import until
from worker_rig import (
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

from pd_core.config import PrefillConfig
from pd_core.engine import Engine, SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import BLOCK_TOKENS

B = BLOCK_TOKENS
BAD_TOKEN = 96


def nobody(_: Sequence[SequenceStep]) -> bool:
    return False


def everybody(_: Sequence[SequenceStep]) -> bool:
    return True


def two_at_once(steps: Sequence[SequenceStep]) -> bool:
    return len(steps) == 2


class PrefillRecorder:
    """The engine, which notes what it is asked.

    holds:    steps before which it stands still for as long as this says so
    is_picky: `BAD_TOKEN` in a step fails it
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.holds: Callable[[Sequence[SequenceStep]], bool] = nobody
        self.shapes: list[list[tuple[int, int]]] = []
        self.is_picky = False
        self.was_cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        self.shapes.append([(step.start, len(step.tokens)) for step in steps])
        while self.holds(steps):
            time.sleep(0.001)
            if is_cancelled():
                self.was_cancelled = True
                break
        if self.is_picky and any(BAD_TOKEN in step.tokens for step in steps):
            raise EngineError("a bad row")
        return self._engine.step(steps, is_cancelled)


def engine_of(worker: Any) -> PrefillRecorder:
    engine = worker.shell.engine
    assert isinstance(engine, PrefillRecorder)
    return engine


def rig_of(times: Times | None = None) -> Any:
    config = small_config(prefill=PrefillConfig(num_blocks=64, chunk_tokens=CHUNK_TOKENS, max_running=8))
    return workers("inproc", config, times=times, trick=PrefillRecorder)  # type: ignore[arg-type]


async def behind_a_gate(rig: Rig, *runs: Run) -> list[asyncio.Task[Any]]:
    """Starts them, one after the other, while the engine stands still in a step of a prompt of its own."""
    engine = engine_of(rig.prefill)
    engine.holds = everybody
    first = rig.run(make_request("first", 1, 2))
    outcomes = [asyncio.ensure_future(outcome_of(first))]
    await until(lambda: len(engine.shapes) > 0, 2.0)
    engine.shapes.clear()
    for number, run in enumerate(runs, 2):
        outcomes.append(asyncio.ensure_future(outcome_of(run)))
        await until(lambda number=number: rig.prefill.num_running == number, 2.0)  # type: ignore[misc]
    return outcomes


async def test_short_prompts_share_steps_and_a_long_one_comes_after_them() -> None:
    async with rig_of() as rig:
        sizes = [3 * CHUNK_TOKENS, 20, 9, 3]
        runs = [rig.run(make_request(f"r{size}", size, 4)) for size in sizes]
        outcomes = await behind_a_gate(rig, *runs)
        engine_of(rig.prefill).holds = nobody
        assert await asyncio.gather(*outcomes) == [None] * 5
        chunk = CHUNK_TOKENS
        assert engine_of(rig.prefill).shapes == [
            [(0, 3), (0, 9), (0, 20)],
            [(0, chunk)],
            [(chunk, chunk)],
            [(2 * chunk, chunk)],
        ]


async def test_the_report_tells_each_prompts_own_share_of_a_step() -> None:
    async with rig_of() as rig:
        runs = [rig.run(make_request(f"r{size}", size, 2)) for size in (5, 8, 2 * CHUNK_TOKENS)]
        legs = []
        await behind_a_gate(rig)
        for run in runs:
            decode = asyncio.ensure_future(run._decode_leg())
            legs += [decode, asyncio.ensure_future(run._prefill_leg())]
        await until(lambda: rig.prefill.num_running == 4, 2.0)
        engine_of(rig.prefill).holds = nobody
        await asyncio.gather(*legs)
        shares = []
        for run in runs:
            assert run.prefill_done is not None
            shares.append([(chunk.start, chunk.num_tokens) for chunk in run.prefill_done.chunks])
            assert run.prefill_done.compute_s == sum(chunk.took_s for chunk in run.prefill_done.chunks)
            begins = [chunk.began_s for chunk in run.prefill_done.chunks]
            assert begins == sorted(begins)
            assert begins[0] >= 0
        assert shares == [[(0, 5)], [(0, 8)], [(0, CHUNK_TOKENS), (CHUNK_TOKENS, CHUNK_TOKENS)]]


async def test_a_prompt_that_the_engine_cannot_compute_ends_alone_and_its_neighbours_are_right() -> None:
    async with rig_of() as rig:
        engine = engine_of(rig.prefill)
        good = [rig.run(msgspec.structs.replace(make_request(f"g{n}", n, 5), tokens=list(range(n)))) for n in (4, 9)]
        bad = rig.run(msgspec.structs.replace(make_request("bad", 6, 5), tokens=[1, 2, BAD_TOKEN]))
        outcomes = await behind_a_gate(rig, good[0], bad, good[1])
        engine.is_picky = True
        engine.holds = nobody
        first, of_good, of_bad, of_other = await asyncio.gather(*outcomes)
        assert first is of_good is of_other is None
        assert isinstance(of_bad, EngineError)
        assert [len(shape) for shape in engine.shapes] == [3, 1, 1, 1]
        await rig.wait_idle(within_s=1.0)


async def test_a_step_goes_on_when_one_of_its_prompts_is_given_up() -> None:
    async with rig_of() as rig:
        engine = engine_of(rig.prefill)
        stays, leaves = (rig.run(make_request(name, 8, 4)) for name in ("stays", "leaves"))
        first, of_stays, of_leaves = await behind_a_gate(rig, stays, leaves)
        engine.holds = two_at_once
        assert await first is None
        await until(lambda: engine.shapes == [[(0, 8), (0, 8)]], 2.0)
        of_leaves.cancel()
        await until(lambda: rig.prefill.shell.counters.values()["requests_cancelled_total"] == 1, 2.0)
        await asyncio.sleep(0.02)
        assert not engine.was_cancelled
        assert rig.prefill.shell.ledger.counts().held == 2, "the engine is still in its blocks"
        engine.holds = nobody
        assert await of_stays is None
        await rig.wait_idle(within_s=1.0)


async def test_a_step_is_given_up_when_all_its_prompts_are() -> None:
    async with rig_of() as rig:
        engine = engine_of(rig.prefill)
        runs = [rig.run(make_request(f"r{number}", 8, 4)) for number in range(2)]
        first, *outcomes = await behind_a_gate(rig, *runs)
        engine.holds = two_at_once
        assert await first is None
        await until(lambda: engine.shapes == [[(0, 8), (0, 8)]], 2.0)
        for outcome in outcomes:
            outcome.cancel()
        await rig.wait_idle(within_s=1.0)
        assert engine.was_cancelled
        assert await outcome_of(rig.run(make_request("next", 8, 4))) is None


async def test_a_short_prompt_beside_a_long_one_has_its_first_token_within_two_chunks() -> None:
    chunk_s = 0.03
    async with rig_of(Times(prefill_chunk_s=chunk_s)) as rig:
        long = rig.run(make_request("long", 16 * CHUNK_TOKENS, 2))
        outcome = asyncio.ensure_future(outcome_of(long))
        await until(lambda: rig.prefill.num_running == 1, 2.0)
        for number in range(6):
            began = len(engine_of(rig.prefill).shapes)
            short = rig.run(make_request(f"short-{number}", 8, 2))
            assert await outcome_of(short) is None
            own = [shape for shape in engine_of(rig.prefill).shapes[began:] if shape == [(0, 8)]]
            at = engine_of(rig.prefill).shapes.index(own[0], began)
            assert at - began <= 1, "only the chunk that was under way came before it"
            assert not outcome.done()
        assert await outcome is None
        check_stream(long)
