"""mixed: prefill and decode on separate workers against both in one worker, on the same cores and the same load.

Measured: four streams run while prompts of 2,048 tokens arrive at a steady rate. Once with one prefill and one decode
worker of one thread each, once with one worker for both phases that has all threads (`--prefill 0`: chunks of the
prompts are mixed into decode steps). What the running streams wait from token to token, what the long prompts wait for
their first token, and all tokens a second.

Boundary: HTTP clients. Both clusters stand side by side and take turns round by round. No target: it is the comparison
that a user would make, and which of the two is better is the user's to say.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import AsyncExitStack

import msgspec

from load_tests.completion_stream import CompletionStream, moments_so_far
from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.prompts import PromptMaker
from load_tests.report import Check, judged
from load_tests.streams import all_of, running_streams
from load_tests.summary import gaps, quantile

SETUPS: dict[str, int] = {"separate": 1, "together": 0}
"""Name and number of prefill workers."""
NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 64
STREAM_MAX_TOKENS = 1024
"""More than a stream can get before it is closed."""
LONG_TOKENS = 2048
LONG_MAX_TOKENS = 16
NUM_LONG = 2
INTERVAL_S = 4.0
QUANTILES = {"p50": 0.5, "p99": 0.99}


class MixedRound(msgspec.Struct, frozen=True):
    """One round of one setup. itl_s: gaps of the running streams while long prompts were there or on their way"""

    itl_s: list[float]
    ttft_s: list[float]
    tokens_per_s: float


class MixedBench:
    name = "mixed"
    summary = "separate prefill and decode workers against both phases in one worker"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        prompts = lab.make_prompts()
        rounds: defaultdict[str, list[MixedRound]] = defaultdict(list)
        async with AsyncExitStack() as stack:
            gateways = {
                name: Gateway(await stack.enter_async_context(lab.cluster(prefill={"num_workers": num_prefill})))
                for name, num_prefill in SETUPS.items()
            }
            for gateway in gateways.values():
                await gateway.complete(prompts.make(LONG_TOKENS), LONG_MAX_TOKENS)
            for number in lab.rounds():
                for name in sorted(gateways, reverse=bool(number % 2)):
                    lab.progress(f"mixed round {number + 1} of {lab.num_rounds}: {name}")
                    rounds[name].append(await _run_load(gateways[name], prompts))
        return bounds + [check for name in SETUPS for check in checks_of(name, rounds[name])]


async def _run_load(gateway: Gateway, prompts: PromptMaker) -> MixedRound:
    made = [prompts.make(STREAM_PROMPT_TOKENS) for _ in range(NUM_STREAMS)]
    async with running_streams(gateway, made, STREAM_MAX_TOKENS, with_token_ids=True) as exchanges:
        began_s = time.monotonic()
        longs = await _send_longs(gateway, prompts, began_s)
        ended_s = time.monotonic()
        running = [moments_so_far(exchange.pieces) for exchange in exchanges]
    return measure_round(running, longs, began_s, ended_s)


async def _send_longs(gateway: Gateway, prompts: PromptMaker, began_s: float) -> list[CompletionStream]:
    """One after each interval, whatever became of the ones before; all have ended at the end."""
    requests = []
    for number in range(NUM_LONG):
        await asyncio.sleep(max(began_s + number * INTERVAL_S - time.monotonic(), 0))
        requests.append(asyncio.create_task(gateway.complete(prompts.make(LONG_TOKENS), LONG_MAX_TOKENS)))
    return await all_of(requests)


def measure_round(
    running: list[list[float]], longs: list[CompletionStream], began_s: float, ended_s: float
) -> MixedRound:
    """running: when each of the running streams got its tokens"""
    inside = [[moment for moment in moments if began_s <= moment <= ended_s] for moments in running]
    num_tokens = sum(map(len, inside)) + sum(LONG_TOKENS + len(stream.arrivals) for stream in longs)
    return MixedRound(
        itl_s=[gap for moments in inside for gap in gaps(moments)],
        ttft_s=[stream.ttft_s for stream in longs],
        tokens_per_s=num_tokens / (ended_s - began_s),
    )


def checks_of(name: str, rounds: list[MixedRound]) -> list[Check]:
    """One setup's figures: quantiles of each round, the median over the rounds."""
    found = [
        judged(f"{name}_itl_{label}", [quantile(r.itl_s, share) * 1e3 for r in rounds], "ms", "lower")
        for label, share in QUANTILES.items()
    ]
    longest = [max(r.itl_s) * 1e3 for r in rounds]
    ttft = [ttft_s * 1e3 for r in rounds for ttft_s in r.ttft_s]
    return [
        *found,
        judged(f"{name}_itl_longest", longest, "ms", "lower"),
        judged(f"{name}_long_ttft", ttft, "ms", "lower"),
        judged(f"{name}_prompt_and_new_tokens", [r.tokens_per_s for r in rounds], "token/s", "higher"),
    ]
