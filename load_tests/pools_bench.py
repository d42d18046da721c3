"""pools: whether tiny pools hold anything up.

Measured: 32 prompts of 80 tokens (5 blocks) with 48 tokens (3 blocks) to generate, all at once through pools of 16
blocks on either side: the longest time in which no stream got a token, how many answers are those of one process
running each request alone, how often a sequence was preempted; and how soon a request is refused that no pool can ever
hold.

Boundary: HTTP clients. The gap counts from the moment when the first request is sent to the end of the last stream.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from load_tests.completion_stream import CompletionStream
from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.report import Check, judged, single
from load_tests.summary import gaps
from pd_core.errors import ConfigError, ProtocolError
from pd_core.layout import BLOCK_TOKENS

POOL_BLOCKS = 16
NUM_PROMPTS = 32
PROMPT_TOKENS = 5 * BLOCK_TOKENS
MAX_TOKENS = 3 * BLOCK_TOKENS
IMPOSSIBLE_TOKENS = POOL_BLOCKS * BLOCK_TOKENS + 1
GAP_TARGET_S = 5.0
REFUSAL_TARGET_S = 1.0
REFUSED = 400
DEADLINE_S = 300.0
PREEMPTIONS = "kvrelay_preemptions_total"


class PoolsBench:
    name = "pools"
    summary = "many requests through tiny pools: right, and never stuck"
    num_rounds = 3

    async def run(self, lab: Lab) -> list[Check]:
        if lab.shape is None:
            raise ConfigError("the fake engine's two roles have different weights: no one process gives their tokens")
        bounds = await measure_bounds(lab)
        prompts = lab.make_prompts()
        made = [prompts.make(PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
        expected = await _alone(lab, made)
        rounds = PoolsRounds(expected)
        sections = {role: {"num_blocks": POOL_BLOCKS} for role in ("prefill", "decode")}
        async with lab.cluster(**sections) as cluster:
            gateway = Gateway(cluster)
            for number in lab.rounds():
                lab.progress(f"pools round {number + 1} of {lab.num_rounds}")
                await rounds.run(gateway, made, prompts.make(IMPOSSIBLE_TOKENS))
            num_preempted = await gateway.metric(PREEMPTIONS)
        return [*bounds, *rounds.checks(), single("preemptions", num_preempted, "", "lower")]


class PoolsRounds:
    """What came of all rounds. expected: each prompt's tokens"""

    def __init__(self, expected: list[list[int]]) -> None:
        self._expected = expected
        self._num_right = 0
        self._num_asked = 0
        self._longest_gaps_s: list[float] = []
        self._took_s: list[float] = []
        self._refusals_s: list[float] = []

    async def run(self, gateway: Gateway, prompts: Sequence[Sequence[int]], impossible: Sequence[int]) -> None:
        requests = [asyncio.create_task(gateway.complete(prompt, MAX_TOKENS, DEADLINE_S)) for prompt in prompts]
        try:
            refusal = await gateway.ask_status(impossible, 1)
        finally:
            results = await asyncio.gather(*requests, return_exceptions=True)
        streams = [result for result in results if isinstance(result, CompletionStream)]
        self._num_asked += len(results)
        self._num_right += sum(
            isinstance(result, CompletionStream) and result.tokens == tokens
            for result, tokens in zip(results, self._expected, strict=True)
        )
        if refusal.status != REFUSED:
            raise ProtocolError(f"a request for more than the pool was answered with HTTP {refusal.status}")
        if not streams:
            raise ProtocolError(f"no request ended well, e.g. {results[0]}")
        self._refusals_s.append(refusal.took_s)
        began_s = min(stream.sent_s for stream in streams)
        moments = [began_s, *itertools.chain.from_iterable(stream.moments for stream in streams)]
        self._longest_gaps_s.append(max(gaps(moments)))
        self._took_s.append(max(moments) - began_s)

    def checks(self) -> list[Check]:
        share = self._num_right / self._num_asked
        num_tokens = len(self._expected) * MAX_TOKENS
        return [
            single("answers_as_alone", share, "", "higher", 1.0, num_samples=self._num_asked),
            single("longest_gap", max(self._longest_gaps_s), "s", "lower", GAP_TARGET_S),
            single("impossible_refused_within", max(self._refusals_s), "s", "lower", REFUSAL_TARGET_S),
            judged("tokens_through_tiny_pools", [num_tokens / took_s for took_s in self._took_s], "token/s", "higher"),
        ]


async def _alone(lab: Lab, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each prompt's tokens from one process that runs nothing else."""
    async with lab.engine(lab.cores) as engine:
        lab.progress(f"computing {len(prompts)} answers alone")
        chunk_tokens = lab.config.prefill.chunk_tokens
        return [await engine.generate(prompt, MAX_TOKENS, chunk_tokens) for prompt in prompts]
