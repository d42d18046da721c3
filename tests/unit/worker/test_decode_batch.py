"""The decode loop: who leaves when, and that no block is given back while the engine may be in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from gate_engine import GateEngine

from decode_worker.batch import DecodeBatch
from decode_worker.roster import Roster
from decode_worker.sequence import DecodeSequence
from pd_core.errors import Cancelled, DeadlineExceeded, EngineError, KvrelayError
from pd_core.ledger import BlockLedger
from pd_core.messages import Preempted, PromptComputed, TokenMade
from pd_core.request import FinishReason, GenerateRequest, SamplingParams
from pd_worker.counters import Counters
from pd_worker.engine_thread import EngineThread
from pd_worker.outbox import Outbox

CHUNK_TOKENS = 32


class Bench:
    """A batch whose engine the test holds in its hand."""

    def __init__(self, max_batch: int = 4, num_blocks: int = 64) -> None:
        self.engine = GateEngine()
        self.thread = EngineThread(self.engine, "bench")
        self.counters = Counters()
        self.ledger = BlockLedger(num_blocks, "boot")
        self.roster = Roster(self.ledger, max_batch, CHUNK_TOKENS, 200.0)
        self.left: list[DecodeSequence] = []
        self.left_inside_a_step = False
        self.num_room_news = 0
        self.running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._somebody_left = asyncio.Event()
        self._tables: dict[str, list[int]] = {}
        self.batch = DecodeBatch(self.roster, self.thread, self.counters, on_left=self._on_left, on_room=self._on_room)

    def _on_left(self, sequence: DecodeSequence) -> None:
        self.left.append(sequence)
        inside = [step for step in self.engine.steps[-1:] if self.engine.is_inside.is_set()]
        table = self._tables[sequence.holder]
        self.left_inside_a_step |= any(step.block_ids is table for steps in inside for step in steps)
        self._somebody_left.set()

    def _on_room(self) -> None:
        self.num_room_news += 1

    def table(self, sequence: DecodeSequence) -> list[int]:
        """Its first table; a preempted one gets another."""
        return self._tables[sequence.holder]

    def join(self, name: str, max_tokens: int, *, max_items: int = 1024, stop: tuple[int, ...] = ()) -> DecodeSequence:
        """One whose KV has come over the wire, with the first token 5."""
        sequence = self._sequence(name, [1, 2, 3], max_tokens, max_items, stop)
        reservation = self.roster.try_reserve(sequence.holder, 3, 3 + max_tokens - 1)
        assert reservation is not None
        self.ledger.commit(reservation.epoch, sequence.holder)
        self.roster.arrived(sequence.holder)
        self._tables[sequence.holder] = self.roster.table(sequence.holder)
        sequence.take(5)
        self.batch.join(sequence)
        self.batch.sweep()
        return sequence

    def join_prompt(self, name: str, num_prompt: int, max_tokens: int) -> DecodeSequence:
        """One whose prompt is computed here."""
        sequence = self._sequence(name, [4] * num_prompt, max_tokens, 1024, ())
        assert self.roster.try_admit(sequence.holder, num_prompt, num_prompt + max_tokens - 1, 0.0)
        self._tables[sequence.holder] = self.roster.table(sequence.holder)
        self.batch.join(sequence)
        return sequence

    def _sequence(
        self, name: str, tokens: list[int], max_tokens: int, max_items: int, stop: tuple[int, ...]
    ) -> DecodeSequence:
        request = GenerateRequest(name, tokens, max_tokens, SamplingParams(), list(stop))
        return DecodeSequence(request, 1, Outbox(max_items), now_s=0.0)

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
    bench.engine.bad_tables = [bench.table(bad)]
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
    bench.engine.bad_tables = [bench.table(bad)]
    bench.engine.gate.set()
    await bench.until_left(bad, gone, last)
    assert [[list(step.block_ids) for step in steps] for steps in bench.engine.steps[1:3]] == [
        [bench.table(bad)],
        [bench.table(last)],
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


# prompts computed here, and sequences that lose their blocks


@contextlib.asynccontextmanager
async def small_pool(num_blocks: int, max_batch: int = 4) -> AsyncIterator[Bench]:
    bench = Bench(max_batch, num_blocks)
    bench.thread.start()
    running = asyncio.ensure_future(bench.batch.run())
    try:
        yield bench
    finally:
        bench.engine.gate.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bench.thread.close(2.0)
    assert not bench.left_inside_a_step
    bench.roster.validate()
    assert bench.ledger.counts().is_idle


def shapes(bench: Bench) -> list[list[tuple[int, int, bool]]]:
    """Of every step: start, number of tokens and whether a token is drawn, sequence by sequence."""
    return [[(step.start, len(step.tokens), step.sample is not None) for step in steps] for steps in bench.engine.steps]


async def test_chunks_of_a_prompt_go_along_with_the_steps_of_those_that_run(bench: Bench) -> None:
    bench.engine.gate.clear()
    running = bench.join("runs", 4)
    await bench.engine.until_inside()
    prompt = bench.join_prompt("prompt", CHUNK_TOKENS + 3, 3)
    bench.engine.gate.set()
    await bench.until_left(running, prompt)
    assert shapes(bench) == [
        [(3, 1, True)],
        [(4, 1, True), (0, CHUNK_TOKENS, False)],
        [(5, 1, True), (CHUNK_TOKENS, 3, True)],
        [(CHUNK_TOKENS + 3, 1, True)],
        [(CHUNK_TOKENS + 4, 1, True)],
    ]
    assert [message.token for message in await messages(prompt)] == [7, 7, 7]
    assert bench.counters.values()["local_prefill_tokens_total"] == CHUNK_TOKENS + 3
    assert bench.num_room_news == 1, "one prompt less is being computed"


async def test_one_that_cannot_grow_takes_the_blocks_of_the_youngest_which_goes_on_later_with_the_next_token() -> None:
    async with small_pool(num_blocks=8) as bench:
        bench.engine.gate.clear()
        old, young = bench.join_prompt("old", 30, 66), bench.join_prompt("young", 20, 60)
        await bench.engine.until_inside()
        bench.engine.gate.set()
        await bench.until_left(old, young)
        told = [message async for message in young.outbox if not isinstance(message, PromptComputed)]
        number = next(place for place, message in enumerate(told) if isinstance(message, Preempted))
        assert told[number] == Preempted(number)
        assert 0 < number < 60
        del told[number]
        assert [message.index for message in told if isinstance(message, TokenMade)] == list(range(60))
        assert [message.index for message in await messages(old)] == list(range(66))
        totals = bench.counters.values()
        assert totals["preemptions_total"] == 1
        assert totals["local_prefill_tokens_total"] == 50
        assert totals["recomputed_tokens_total"] == 20 + number - 1, "the last token's KV had not been made yet"
        assert totals["decode_tokens_total"] == 126
        chunks = [list(step.tokens) for steps in bench.engine.steps for step in steps if len(step.tokens) > 1]
        assert chunks[:2] == [[4] * 20, [4] * 30] or chunks[:2] == [[4] * 30, [4] * 20]
        assert [token for chunk in chunks[2:] for token in chunk] == [4] * 20 + [7] * number


async def test_one_that_waits_for_blocks_leaves_at_once_and_inside_a_step() -> None:
    async with small_pool(num_blocks=8) as bench:
        old, young = bench.join_prompt("old", 30, 66), bench.join_prompt("young", 20, 60)
        while not bench.roster.has_waiting:
            await asyncio.sleep(0)
        bench.engine.gate.clear()
        await bench.engine.until_inside()
        bench.end(young, Cancelled("left"))
        assert bench.left == [young]
        bench.engine.gate.set()
        await bench.until_left(old)
        assert len(await messages(old)) == 66


@pytest.mark.parametrize("hears", [True, False])
async def test_one_that_leaves_while_its_prompt_is_computed_keeps_its_blocks_until_the_engine_is_out(
    bench: Bench, hears: bool
) -> None:
    bench.engine.gate.clear()
    bench.engine.hears_cancelled = hears
    prompt = bench.join_prompt("prompt", 3 * CHUNK_TOKENS, 3)
    await bench.engine.until_inside()
    bench.end(prompt, Cancelled("left"))
    assert bench.left == []
    if not hears:
        await asyncio.sleep(0.01)
        assert bench.left == []
        bench.engine.gate.set()
    await bench.until_left(prompt)
    assert bench.engine.was_cancelled
    assert bench.ledger.counts().is_idle


async def test_a_prompt_that_fails_alone_too_ends_and_those_who_run_miss_no_token(bench: Bench) -> None:
    bench.engine.gate.clear()
    running = bench.join("runs", 4)
    await bench.engine.until_inside()
    bad = bench.join_prompt("bad", 3 * CHUNK_TOKENS, 3)
    bench.engine.bad_tables = [bench.table(bad)]
    bench.engine.gate.set()
    await bench.until_left(running, bad)
    with pytest.raises(EngineError, match="a bad row"):
        await messages(bad)
    assert len(await messages(running)) == 4


async def test_a_preempted_one_whose_router_does_not_read_ends_and_is_not_computed_again() -> None:
    async with small_pool(num_blocks=8) as bench:
        old, young = bench.join_prompt("old", 30, 66), bench.join_prompt("young", 20, 60)
        young.outbox._max_items = 0
        await bench.until_left(old, young)
        with pytest.raises(DeadlineExceeded):
            await messages(young)


async def test_a_router_that_does_not_read_loses_a_stream_that_is_preempted_and_that_leaves_though_nobody_runs() -> (
    None
):
    async with small_pool(num_blocks=4) as bench:
        deaf = bench.join("deaf", 60, max_items=46)
        ticket = bench.roster.try_reserve("ticket", 16, 16)
        assert ticket is not None
        await bench.until_left(deaf)
        with pytest.raises(DeadlineExceeded, match="nobody reads"):
            await messages(deaf)
        assert not bench.roster.has_waiting, "nobody else could be let in"
        bench.ledger.abort(ticket.epoch)
        bench.ledger.end_quarantine(ticket.epoch)
        bench.roster.leave("ticket")
