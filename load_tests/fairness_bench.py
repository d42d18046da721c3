"""fairness: whether a long prompt holds up short ones.

Measured: the time to first token of prompts of 64 tokens that arrive at a steady rate, alone and while prompts of 4,000
tokens are computed one after the other. The difference of the two p99 may be two chunks: the one that is under way, and
one more. A chunk's time is measured in the run: the median over all full chunks of the long prompts that were computed
beside the short ones, as the prefill worker saw them.

Boundary: a streaming client's time from writing its request to the first bytes, as in `ttft`. Requests leave when it is
their time, whatever became of the ones before.
"""

from __future__ import annotations

import asyncio
import time

from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.prompts import PromptMaker
from load_tests.report import Check, judged, single
from load_tests.request_timeline import RequestTimeline
from load_tests.streams import all_of
from load_tests.summary import median, quantile
from pd_core.errors import ProtocolError

SHORT_TOKENS = 64
LONG_TOKENS = 4000
NUM_SHORT = 20
"""In a round, alone and again beside long prompts: with five rounds a hundred of each, enough for a p99."""
INTERVAL_S = 0.3
LEAD_S = 0.5
"""The long prompt is under way when the first short one comes."""
MAX_TOKENS = 4
P99 = 0.99
NUM_CHUNKS = 2


class FairnessBench:
    name = "fairness"
    summary = "time to first token of short prompts beside long ones"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        prompts = lab.make_prompts()
        rounds = FairnessRounds(lab.config.prefill.chunk_tokens)
        async with lab.cluster() as cluster:
            gateway = Gateway(cluster)
            await gateway.complete(prompts.make(LONG_TOKENS), MAX_TOKENS)
            for number in lab.rounds():
                lab.progress(f"fairness round {number + 1} of {lab.num_rounds}")
                rounds.alone_s += await _send_shorts(gateway, prompts)
                await rounds.run_beside(gateway, prompts)
        return bounds + rounds.checks()


class FairnessRounds:
    """Seconds to the first token of all rounds."""

    def __init__(self, chunk_tokens: int) -> None:
        self.alone_s: list[float] = []
        self.beside_s: list[float] = []
        self.long_s: list[float] = []
        self.chunks_s: list[float] = []
        self._chunk_tokens = chunk_tokens

    async def run_beside(self, gateway: Gateway, prompts: PromptMaker) -> None:
        is_over = asyncio.Event()
        longs = asyncio.create_task(self._send_longs(gateway, prompts, is_over))
        try:
            await asyncio.sleep(LEAD_S)
            self.beside_s += await _send_shorts(gateway, prompts)
        finally:
            is_over.set()
            await longs

    async def _send_longs(self, gateway: Gateway, prompts: PromptMaker, is_over: asyncio.Event) -> None:
        """One after the other; the one that is under way at the end is waited for."""
        while not is_over.is_set():
            stream = await gateway.complete(prompts.make(LONG_TOKENS), MAX_TOKENS)
            self.long_s.append(stream.ttft_s)
            self.chunks_s += full_chunks_s(await gateway.timeline(stream.request_id), self._chunk_tokens)

    def checks(self) -> list[Check]:
        alone_ms, beside_ms = (quantile(samples, P99) * 1e3 for samples in (self.alone_s, self.beside_s))
        chunk_ms = median(self.chunks_s) * 1e3
        num = len(self.beside_s)
        return [
            single("short_ttft_p99_alone", alone_ms, "ms", "lower", num_samples=len(self.alone_s)),
            single(
                "short_ttft_p99_beside_long",
                beside_ms,
                "ms",
                "lower",
                alone_ms + NUM_CHUNKS * chunk_ms,
                num_samples=num,
            ),
            single("short_ttft_p99_added", (beside_ms - alone_ms) / chunk_ms, "chunks", "lower", num_samples=num),
            judged("short_ttft_alone", [s * 1e3 for s in self.alone_s], "ms", "lower"),
            judged("short_ttft_beside_long", [s * 1e3 for s in self.beside_s], "ms", "lower"),
            judged("long_chunk", [s * 1e3 for s in self.chunks_s], "ms", "lower"),
            judged("long_ttft_beside_short", [s * 1e3 for s in self.long_s], "ms", "lower"),
        ]


async def _send_shorts(gateway: Gateway, prompts: PromptMaker) -> list[float]:
    """Seconds to the first token of each, sent at a steady rate."""
    began_s = time.monotonic()
    requests = []
    for number in range(NUM_SHORT):
        await asyncio.sleep(max(began_s + number * INTERVAL_S - time.monotonic(), 0))
        requests.append(asyncio.create_task(gateway.complete(prompts.make(SHORT_TOKENS), MAX_TOKENS)))
    return [stream.ttft_s for stream in await all_of(requests)]


def full_chunks_s(timeline: RequestTimeline, chunk_tokens: int) -> list[float]:
    """Seconds of the chunks of full length. Raises ProtocolError when the timeline has none."""
    chunks = timeline.prefill.chunks if timeline.prefill is not None else []
    took_s = [chunk.took_ms / 1e3 for chunk in chunks if chunk.num_tokens == chunk_tokens]
    if not took_s:
        raise ProtocolError(f"no chunk of {chunk_tokens} tokens in {timeline}")
    return took_s
