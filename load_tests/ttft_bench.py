"""ttft: what the cluster adds to the time until the first token.

Measured: a streaming client's time from writing its request to the first bytes of the answer, minus the time that the
bare engine takes for a prompt of as many tokens; prompts of 64 and of 2,048 tokens, one at a time. In it: HTTP, reading
the request, the queue, the decode worker's reservation, the ticket, the way to the prefill worker, the digests and
pushes of all chunks but the last (they run beside the next chunk, on the same core), and the first token's way back.

Boundary: the connection stands already. The bare engine is a process tied to the prefill worker's cores with as many
threads and the same chunks; it and the cluster take turns, the other one is idle. Each round compares its own pair.
"""

from __future__ import annotations

from load_tests.engine_client import EngineClient
from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.prompts import PromptMaker
from load_tests.report import Check, judged

PROMPT_TOKENS = (64, 2048)
TARGET_MS = 15.0
MAX_TOKENS = 3
"""More than one, so that the whole handoff takes place."""


class TtftBench:
    name = "ttft"
    summary = "time to the first token through the cluster beyond the bare engine's prefill"
    num_rounds = 7

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        prompts = lab.make_prompts()
        samples: dict[int, list[tuple[float, float]]] = {size: [] for size in PROMPT_TOKENS}
        async with lab.cluster() as cluster:
            gateway = Gateway(cluster)
            async with lab.engine(cluster.worker("prefill").cores, lab.config.prefill.num_threads) as engine:
                for size in PROMPT_TOKENS:  # threads, pages and connections
                    await self._measure(lab, gateway, engine, prompts, size, is_engine_first=False)
                for number in lab.rounds():
                    lab.progress(f"ttft round {number + 1} of {lab.num_rounds}")
                    for size, pairs in samples.items():
                        is_engine_first = bool(number % 2)
                        pairs.append(await self._measure(lab, gateway, engine, prompts, size, is_engine_first))
        return bounds + [check for size, pairs in samples.items() for check in checks_of(size, pairs)]

    async def _measure(
        self, lab: Lab, gateway: Gateway, engine: EngineClient, prompts: PromptMaker, size: int, is_engine_first: bool
    ) -> tuple[float, float]:
        """Seconds through the cluster, and of the bare engine."""
        chunk_tokens = lab.config.prefill.chunk_tokens
        bare_s = await engine.time_prefill(size, chunk_tokens, seed=size) if is_engine_first else None
        ttft_s = (await gateway.complete(prompts.make(size), MAX_TOKENS)).ttft_s
        if bare_s is None:
            bare_s = await engine.time_prefill(size, chunk_tokens, seed=size)
        return ttft_s, bare_s


def checks_of(size: int, pairs: list[tuple[float, float]]) -> list[Check]:
    """pairs: seconds through the cluster and of the bare engine, round by round"""
    added_ms = [(ttft_s - bare_s) * 1e3 for ttft_s, bare_s in pairs]
    return [
        judged(f"ttft_{size}", [ttft_s * 1e3 for ttft_s, _ in pairs], "ms", "lower"),
        judged(f"bare_prefill_{size}", [bare_s * 1e3 for _, bare_s in pairs], "ms", "lower"),
        judged(f"ttft_{size}_added", added_ms, "ms", "lower", TARGET_MS),
    ]
