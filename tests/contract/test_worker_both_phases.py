"""Both phases on one decode worker: the prompt's chunks go along with the steps of those who run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from waiting import until
from worker_rig import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    Rig,
    RunBoth,
    Times,
    check_stream,
    make_request,
    outcome_of,
    small_config,
    workers,
)

from pd_core.config import DecodeConfig, PrefillConfig
from pd_core.engine import Engine, SequenceStep
from pd_core.errors import ContextLengthExceeded, EngineError, InvalidRequest, Overloaded, Unavailable
from pd_core.layout import BLOCK_TOKENS
from pd_core.messages import Drain, Drained
from pd_core.request import continue_request

B = BLOCK_TOKENS
SLOW = Times(decode_step_s=0.01)
ALONE = small_config(
    prefill=PrefillConfig(num_workers=0, num_blocks=1, chunk_tokens=CHUNK_TOKENS),
    decode=DecodeConfig(num_blocks=64, max_batch=8, max_reserved=8),
)


class Recorder:
    """The engine, which notes the shape of every step, and finds a bad row wherever `bad_token` is run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.shapes: list[list[tuple[int, int]]] = []
        self.bad_token: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        self.shapes.append([(step.start, len(step.tokens)) for step in steps])
        if any(self.bad_token in step.tokens for step in steps):
            raise EngineError("a bad row")
        return self._engine.step(steps, is_cancelled)


def recorder(rig: Rig) -> Recorder:
    engine = rig.decode.shell.engine
    assert isinstance(engine, Recorder)
    return engine


async def test_every_prompt_size_and_length_gives_decodes_own_tokens() -> None:
    async with workers("inproc", ALONE) as rig:
        chunk = CHUNK_TOKENS
        for num_prompt in (1, 2, B - 1, B, B + 1, chunk - 1, chunk, chunk + 1, 3 * chunk, 3 * chunk + 1):
            for max_tokens in (1, 2, B + 1):
                run = rig.run_both(make_request(f"{num_prompt}-{max_tokens}", num_prompt, max_tokens))
                assert await outcome_of(run) is None
                assert run.prompt_computed is not None
                shares = [(start, min(chunk, num_prompt - start)) for start in range(0, num_prompt, chunk)]
                assert [(done.start, done.num_tokens) for done in run.prompt_computed.chunks] == shares
                assert run.prompt_computed.compute_s == sum(done.took_s for done in run.prompt_computed.chunks)
        assert rig.decode.shell.counters.values()["handoffs_committed_total"] == 0


async def test_a_stop_token_may_be_the_first_and_a_continuation_goes_on_at_its_index() -> None:
    async with workers("inproc", ALONE) as rig:
        free = rig.run_both(make_request("free", 20, 9))
        whole = await free.tokens()
        stopped = rig.run_both(make_request("stopped", 20, 9, stop=(whole[0],)))
        stopped.request = msgspec.structs.replace(free.request, request_id="stopped", stop_token_ids=[whole[0]])
        assert await stopped.tokens() == whole[:1]
        rest = rig.run_both(continue_request(free.request, whole[:4]), attempt=2)
        assert await rest.tokens() == whole[4:]
        assert rest.made[0].index == 4


async def test_chunks_are_as_long_as_configured_and_go_along_with_those_who_run() -> None:
    config = small_config(decode=DecodeConfig(num_blocks=64, prompt_chunk_tokens=2 * B))
    async with workers("inproc", config, times=SLOW, trick=Recorder) as rig:  # type: ignore[arg-type]
        running = rig.run(make_request("running", 5, 40))  # its KV comes from the prefill worker
        first = asyncio.ensure_future(running.tokens())
        await until(lambda: len(running.made) > 2, 2.0)
        both = rig.run_both(make_request("both", 5 * B, 20))
        await asyncio.gather(first, both.tokens())
        check_stream(running)
        check_stream(both)
        chunks = [shape[1:] for shape in recorder(rig).shapes if any(num_tokens > 1 for _, num_tokens in shape)]
        assert chunks == [[(0, 2 * B)], [(2 * B, 2 * B)], [(4 * B, B)]], "one step each, behind the one who runs"


async def test_short_prompts_share_a_step() -> None:
    async with workers("inproc", ALONE, times=SLOW, trick=Recorder) as rig:  # type: ignore[arg-type]
        runs = [rig.run_both(make_request(f"r{number}", 8, 30)) for number in range(5)]
        assert await asyncio.gather(*(outcome_of(run) for run in runs)) == [None] * 5
        shared = max(sum(start == 0 for start, _ in shape) for shape in recorder(rig).shapes)
        assert shared >= 4


async def test_the_counters_tell_local_prompts_from_those_of_prefill_workers() -> None:
    async with workers("inproc") as rig:
        await rig.run_both(make_request("here", 40, 5)).tokens()
        await rig.run(make_request("there", 33, 5)).tokens()
        decode, prefill = await rig.status(rig.to_decode), await rig.status(rig.to_prefill)
        assert decode.counters["local_prefill_tokens_total"] == 40
        assert prefill.counters["prefill_tokens_total"] == 33
        assert decode.counters["prefill_tokens_total"] == decode.counters["recomputed_tokens_total"] == 0
        assert decode.counters["decode_tokens_total"] == 5 + 4


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(60, 5, "max_tokens"), (64, 1, "messages"), (500, 1, "messages"), (1, 64, "max_tokens")],
)
async def test_what_can_never_fit_is_refused_at_once(num_prompt: int, max_tokens: int, param: str) -> None:
    async with workers("inproc", small_config(decode=DecodeConfig(num_blocks=4))) as rig:
        failure = await outcome_of(rig.run_both(make_request("big", num_prompt, max_tokens)))
        assert isinstance(failure, ContextLengthExceeded)
        assert failure.param == param
        assert rig.is_idle
        assert await outcome_of(rig.run_both(make_request("fits", 60, 4))) is None


async def test_too_many_prompts_at_once_are_refused_and_one_attempt_cannot_be_here_twice() -> None:
    config = small_config(decode=DecodeConfig(num_blocks=64, max_reserved=2))
    async with workers("inproc", config, times=SLOW) as rig:
        runs = [rig.run_both(make_request(f"r{number}", CONTEXT_TOKENS // 3, 2)) for number in range(2)]
        tokens = [asyncio.ensure_future(outcome_of(run)) for run in runs]
        await asyncio.gather(*(run.granted.wait() for run in runs))
        assert isinstance(await outcome_of(rig.run_both(make_request("third", 5, 2))), Overloaded)
        assert isinstance(await outcome_of(rig.run(make_request("fourth", 5, 2))), Overloaded)
        assert isinstance(await outcome_of(rig.run_both(make_request("r0", 5, 2))), InvalidRequest)
        assert await asyncio.gather(*tokens) == [None, None]
        assert await outcome_of(rig.run_both(make_request("third", 5, 2), attempt=2)) is None


async def test_a_router_that_leaves_in_any_phase_gets_every_block_back() -> None:
    phases: list[Callable[[RunBoth], bool]] = [
        lambda run: True,
        lambda run: run.granted.is_set(),
        lambda run: len(run.made) > 0,
        lambda run: len(run.made) > 5,
    ]
    async with workers("inproc", ALONE, times=SLOW) as rig:
        for number, holds in enumerate(phases):
            run = rig.run_both(make_request(f"left-{number}", 4 * CHUNK_TOKENS, 100))
            tokens = asyncio.ensure_future(run.tokens())
            await until(lambda holds=holds, run=run: holds(run), 2.0)  # type: ignore[misc]
            tokens.cancel()
            await asyncio.gather(tokens, return_exceptions=True)
            await rig.wait_idle(within_s=1.0)
            assert rig.decode.num_running == rig.decode.num_waiting == 0
        assert rig.decode.shell.counters.values()["requests_cancelled_total"] == 3


async def test_a_prompt_that_the_engine_cannot_compute_fails_alone() -> None:
    async with workers("inproc", ALONE, times=SLOW, trick=Recorder) as rig:  # type: ignore[arg-type]
        good = rig.run_both(msgspec.structs.replace(make_request("good", 10, 40), tokens=[1] * 10))
        tokens = asyncio.ensure_future(outcome_of(good))
        await until(lambda: len(good.made) > 2, 2.0)
        bad_token = next(token for token in range(97) if token not in [message.token for message in good.made])
        bad = rig.run_both(msgspec.structs.replace(make_request("bad", 60, 4), tokens=[2] * 60 + [bad_token]))
        recorder(rig).bad_token = bad_token
        failure = await outcome_of(bad)
        assert isinstance(failure, EngineError)
        recorder(rig).bad_token = None
        assert await tokens is None


async def test_draining_lets_prompts_be_computed_and_refuses_new_ones() -> None:
    async with workers("inproc", ALONE, times=SLOW) as rig:
        run = rig.run_both(make_request("last", 4 * CHUNK_TOKENS, 10))
        tokens = asyncio.ensure_future(outcome_of(run))
        await run.granted.wait()
        draining = asyncio.ensure_future(rig.to_decode.call(Drain(grace_s=5.0), 10.0))
        await asyncio.sleep(0.01)
        assert isinstance(await outcome_of(rig.run_both(make_request("late", 5, 5))), Unavailable)
        assert await draining == Drained(num_cut=0)
        assert await tokens is None


async def test_requests_of_both_kinds_at_random_moments_do_not_disturb_each_other() -> None:
    generator = random.Random(9)
    async with workers("tcp") as rig:

        async def one(number: int) -> None:
            await asyncio.sleep(generator.random() * 0.1)
            request = make_request(f"r{number}", generator.randrange(1, 100), generator.randrange(1, 20))
            run = generator.choice([rig.run, rig.run_both])(request)
            assert await outcome_of(run) is None

        for first in range(0, 28, 7):
            await asyncio.gather(*(one(first + place) for place in range(7)))
        await rig.wait_idle()
