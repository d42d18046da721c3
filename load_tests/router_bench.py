"""router: what the router's process costs for every token that it streams.

Measured: processor time of the router's process, all its threads, program and kernel, while 16 clients stream plain
text; divided by the tokens that they got meanwhile. In it: reading the workers' streams, the request's machine, turning
ids into text, writing server-sent events, heartbeats, and what Ray does in that process.

Boundary: from the moment when all 16 streams have begun until the first of them ends, so requests and their prompts are
not in it. Tokens are counted as events with text: a token that is half a character is none, which makes the figure
rather too high. What the idle router costs is a figure of its own.
"""

from __future__ import annotations

import asyncio
import time

from load_tests.clusters import RunningCluster
from load_tests.completion_stream import text_moments
from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.process_cpu import cpu_s
from load_tests.prompts import PromptMaker
from load_tests.report import Check, judged
from load_tests.streams import running_streams, wait_all_ended, wait_first_ended

NUM_STREAMS = 16
PROMPT_TOKENS = 64
MAX_TOKENS = 224
TARGET_MS = 0.06
IDLE_S = 2.0


class RouterBench:
    name = "router"
    summary = "processor time of the router's process for every streamed token"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        prompts = lab.make_prompts()
        busy_ms: list[float] = []
        beyond_idle_ms: list[float] = []
        idle_ms: list[float] = []
        rates: list[float] = []
        async with lab.cluster() as cluster:
            await _run_streams(cluster, prompts)
            for number in lab.rounds():
                lab.progress(f"router round {number + 1} of {lab.num_rounds}")
                idle_ms.append(await _idle_ms_per_s(cluster.router_pid))
                used_s, took_s, num_tokens = await _run_streams(cluster, prompts)
                busy_ms.append(used_s * 1e3 / num_tokens)
                beyond_idle_ms.append((used_s * 1e3 - idle_ms[-1] * took_s) / num_tokens)
                rates.append(num_tokens / took_s)
        return [
            *bounds,
            judged("router_cpu_per_token_16_streams", busy_ms, "ms", "lower", TARGET_MS),
            judged("router_cpu_per_token_beyond_idle", beyond_idle_ms, "ms", "lower"),
            judged("streamed_rate_16_streams", rates, "token/s", "higher"),
            judged("router_cpu_idle", idle_ms, "ms/s", "lower"),
        ]


async def _run_streams(cluster: RunningCluster, prompts: PromptMaker) -> tuple[float, float, int]:
    """Processor seconds of the router, seconds, and tokens, while all streams ran."""
    gateway = Gateway(cluster)
    made = [prompts.make(PROMPT_TOKENS) for _ in range(NUM_STREAMS)]
    async with running_streams(gateway, made, MAX_TOKENS, with_token_ids=False) as exchanges:
        began_s, before_s = time.monotonic(), cpu_s(cluster.router_pid)
        await wait_first_ended(exchanges)
        ended_s, after_s = time.monotonic(), cpu_s(cluster.router_pid)
        await wait_all_ended(exchanges)
        moments = [moment for exchange in exchanges for moment in text_moments(exchange.reply())]
    num_tokens = sum(began_s <= moment < ended_s for moment in moments)
    return after_s - before_s, ended_s - began_s, num_tokens


async def _idle_ms_per_s(pid: int) -> float:
    before_s = cpu_s(pid)
    await asyncio.sleep(IDLE_S)
    return (cpu_s(pid) - before_s) * 1e3 / IDLE_S
