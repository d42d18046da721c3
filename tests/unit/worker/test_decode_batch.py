"""The decode loop: who leaves when, and that no block is given back while the engine may be in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from gate_engine import GateEngine

from decode_worker.batch import DecodeBatch
from decode_worker.sequence import DecodeSequence
from pd_core.errors import Cancelled, DeadlineExceeded, EngineError, KvrelayError
from pd_core.messages import TokenMade
from pd_core.request import FinishReason, GenerateRequest, SamplingParams
from pd_core.ticket import FirstToken
from pd_worker.counters import Counters
from pd_worker.engine_thread import EngineThread
from pd_worker.outbox import Outbox


class Bench:
    """A batch whose engine the test holds in its hand."""

    def __init__(self, max_batch: int = 4) -> None:
        self.engine = GateEngine()
        self.thread = EngineThread(self.engine, "bench")
        self.left: list[DecodeSequence] = []
        self.left_inside_a_step = False
        self.running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._somebody_left = asyncio.Event()
        self.batch = DecodeBatch(self.thread, Counters(), max_batch, self._on_left)

    def _on_left(self, sequence: DecodeSequence) -> None:
        self.left.append(sequence)
        inside = [step for step in self.engine.steps[-1:] if self.engine.is_inside.is_set()]
        self.left_inside_a_step |= any(step.block_ids is sequence.table for steps in inside for step in steps)
        self._somebody_left.set()

    def join(self, name: str, max_tokens: int, *, max_items: int = 1024, stop: tuple[int, ...] = ()) -> DecodeSequence:
        request = GenerateRequest(name, [1, 2, 3], max_tokens, SamplingParams(), list(stop))
        sequence = DecodeSequence(request, 1, Outbox(max_items))
        sequence.begin(FirstToken(5, 0), [len(name)])
        self.batch.join(sequence)
        self.batch.sweep()
        return sequence

    def end(self, sequence: DecodeSequence, error: KvrelayError) -> None:
        sequence.end(error)
        self.batch.sweep()

    async def until_left(self, *sequences: DecodeSequence) -> None:
        async with asyncio.timeout(2.0):
            while not all(sequence in self.left for sequence in sequences):
                self._somebody_left.clear()
                await self._somebody_left.wait()


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.thread.start()
    bench.running = asyncio.ensure_future(bench.batch.run())
    yield bench
    bench.engine.gate.set()
    bench.running.cancel()
    await asyncio.gather(bench.running, return_exceptions=True)
    await bench.thread.close(2.0)
    assert not bench.left_inside_a_step
    assert len(set(map(id, bench.left))) == len(bench.left), "somebody left twice"


async def messages(sequence: DecodeSequence) -> list[TokenMade]:
    return [message async for message in sequence.outbox if isinstance(message, TokenMade)]


async def test_a_sequence_leaves_after_its_last_token(bench: Bench) -> None:
    sequence = bench.join("a", 3)
    await bench.until_left(sequence)
    assert await messages(sequence) == [TokenMade(0, 5), TokenMade(1, 7), TokenMade(2, 7, FinishReason.LENGTH)]
    assert len(bench.engine.steps) == 2


async def test_steps_run_the_token_whose_kv_is_missing_and_never_the_last_one(bench: Bench) -> None:
    sequence = bench.join("a", 3)
    await bench.until_left(sequence)
    assert [(list(step.tokens), step.start) for [step] in bench.engine.steps] == [([5], 3), ([7], 4)]


async def test_a_first_token_that_is_the_last_takes_no_step(bench: Bench) -> None:
    by_length, by_stop = bench.join("a", 1), bench.join("b", 9, stop=(5,))
    await bench.until_left(by_length, by_stop)
    assert bench.engine.steps == []
    assert [message.finish for message in await messages(by_stop)] == [FinishReason.STOP]


async def test_one_that_is_cancelled_inside_a_step_leaves_after_it_and_the_others_go_on(bench: Bench) -> None:
    bench.engine.gate.clear()
    gone, stays = bench.join("a", 9), bench.join("bb", 3)
    await bench.engine.until_inside()
    assert len(bench.engine.steps[-1]) == 2
    bench.end(gone, Cancelled("left"))
    assert bench.left == []
    await asyncio.sleep(0.01)
    assert bench.engine.is_inside.is_set(), "the step is still wanted"
    bench.engine.gate.set()
    await bench.until_left(gone, stays)
    assert not bench.engine.was_cancelled
    assert len(await messages(stays)) == 3


async def test_a_step_that_nobody_wants_any_more_is_cancelled(bench: Bench) -> None:
    bench.engine.gate.clear()
    sequence = bench.join("a", 9)
    await bench.engine.until_inside()
    bench.end(sequence, Cancelled("left"))
    await bench.until_left(sequence)
    assert bench.engine.was_cancelled
    bench.engine.gate.set()
    following = bench.join("b", 2)
    await bench.until_left(following)
    assert len(await messages(following)) == 2


async def test_blocks_of_a_cancelled_sequence_stay_until_a_deaf_engine_has_left_the_step(bench: Bench) -> None:
    bench.engine.gate.clear()
    bench.engine.hears_cancelled = False
    sequence = bench.join("a", 9)
    await bench.engine.until_inside()
    bench.end(sequence, Cancelled("left"))
    await asyncio.sleep(0.02)
    assert bench.left == []
    bench.engine.gate.set()
    await bench.until_left(sequence)


async def test_one_that_waits_for_its_turn_leaves_at_once(bench: Bench) -> None:
    bench.engine.gate.clear()
    running = [bench.join(f"r{number}", 9) for number in range(4)]
    waiting = bench.join("waiting", 9)
    await bench.engine.until_inside()
    bench.end(waiting, Cancelled("left"))
    assert bench.left == [waiting]
    bench.engine.gate.set()
    await bench.until_left(*running)


async def test_a_failed_step_fails_everybody_in_it_and_nobody_after_it(bench: Bench) -> None:
    bench.engine.gate.clear()
    first = [bench.join(f"r{number}", 2) for number in range(4)]
    await bench.engine.until_inside()
    bench.engine.failure = EngineError("broke")
    bench.engine.gate.set()
    await bench.until_left(*first)
    bench.engine.failure = None
    for sequence in first:
        with pytest.raises(EngineError, match="broke"):
            await messages(sequence)
    waiting = bench.join("next", 2)
    await bench.until_left(waiting)
    assert len(await messages(waiting)) == 2


async def test_a_sequence_that_fails_alone_too_ends_and_its_neighbours_miss_no_token(bench: Bench) -> None:
    bench.engine.gate.clear()
    first, bad, last = bench.join("a", 4), bench.join("bb", 4), bench.join("ccc", 4)
    await bench.engine.until_inside()
    bench.engine.bad_tables = [bad.table]
    bench.engine.gate.set()
    await bench.until_left(first, bad, last)
    with pytest.raises(EngineError, match="a bad row"):
        await messages(bad)
    tokens = [TokenMade(0, 5), TokenMade(1, 7), TokenMade(2, 7), TokenMade(3, 7, FinishReason.LENGTH)]
    assert await messages(first) == await messages(last) == tokens
    assert [len(steps) for steps in bench.engine.steps] == [3, 1, 1, 1, 2, 2]


async def test_who_is_cancelled_while_a_failed_step_is_taken_apart_is_not_run_again(bench: Bench) -> None:
    bench.engine.gate.clear()
    bad, gone, last = bench.join("a", 4), bench.join("bb", 4), bench.join("ccc", 4)
    await bench.engine.until_inside()
    bench.end(gone, Cancelled("left"))
    bench.engine.bad_tables = [bad.table]
    bench.engine.gate.set()
    await bench.until_left(bad, gone, last)
    assert [[list(step.block_ids) for step in steps] for steps in bench.engine.steps[1:3]] == [
        [bad.table],
        [last.table],
    ]
    assert len(await messages(last)) == 4


async def test_a_result_that_is_none_ends_the_loop_for_its_owner_to_see(bench: Bench) -> None:
    bench.engine.gate.clear()
    sequence = bench.join("a", 4)
    await bench.engine.until_inside()
    bench.engine.is_mute = True
    bench.engine.gate.set()
    with pytest.raises(ValueError, match="zip"):
        await bench.running
    bench.end(sequence, Cancelled("the worker ends"))
    assert bench.left == [sequence], "the step that broke is over: its blocks come back"


async def test_a_router_that_does_not_read_loses_its_own_stream_only(bench: Bench) -> None:
    deaf, other = bench.join("deaf", 400, max_items=5), bench.join("other", 50)
    await bench.until_left(deaf, other)
    assert len(await messages(other)) == 50
    with pytest.raises(DeadlineExceeded, match="nobody reads"):
        await messages(deaf)
