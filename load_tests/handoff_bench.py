"""handoff: how long decode waits for KV after the first token is there.

Measured: the exposed handoff, from the moment when the router has the first token, which the prefill worker sends off
before it does anything else, until the router knows that the decode worker has committed and may run its first step
(`exposed_ms` of the request's timeline). Both moments are of the router's clock, and both have one message's way in
them. Between them lie the digests and the push of the last chunk's blocks, their check on arrival, and the commit.
Prompts of 64, 512 and 2,048 tokens over shared memory and over TCP, with an idle decode worker and beside four running
streams.

Boundary: pushes of all chunks but the last run beside the next chunk and are hidden; what they cost shows in `ttft`.
The two clusters, one for each path, stand side by side; one works at a time.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Literal

from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.prompts import PromptMaker
from load_tests.report import Check, judged
from load_tests.request_timeline import RequestTimeline
from load_tests.streams import running_streams
from pd_core.errors import ProtocolError

Path = Literal["shm", "tcp"]

TARGETS_MS: dict[Path, float] = {"shm": 5.0, "tcp": 15.0}
PROMPT_TOKENS = (64, 512, 2048)
MAX_TOKENS = 3
BATCHES = (0, 4)
BATCH_PROMPT_TOKENS = 64
BATCH_MAX_TOKENS = 1024
"""More than the batch can get before it is closed."""


class HandoffBench:
    name = "handoff"
    summary = "from the first token until decode may go on, over shared memory and TCP"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        prompts = lab.make_prompts()
        samples = HandoffSamples()
        async with AsyncExitStack() as stack:
            gateways = {
                path: Gateway(await stack.enter_async_context(lab.cluster(transfer={"path": path})))
                for path in TARGETS_MS
            }
            for path, gateway in gateways.items():
                await _handoffs(gateway, path, prompts)
            for number in lab.rounds():
                for path in sorted(gateways, reverse=bool(number % 2)):
                    for num_running in BATCHES:
                        lab.progress(
                            f"handoff round {number + 1} of {lab.num_rounds}: {path}, beside {num_running} streams"
                        )
                        samples.add(path, num_running, await _beside(gateways[path], path, num_running, prompts))
        return bounds + samples.checks()


class HandoffSamples:
    """Milliseconds of all rounds, by path, running streams and prompt."""

    def __init__(self) -> None:
        self._exposed_ms: defaultdict[tuple[Path, int, int], list[float]] = defaultdict(list)

    def add(self, path: Path, num_running: int, exposed_ms: dict[int, float]) -> None:
        for num_tokens, milliseconds in exposed_ms.items():
            self._exposed_ms[path, num_running, num_tokens].append(milliseconds)

    def checks(self) -> list[Check]:
        return [
            judged(f"{path}_exposed_{num_tokens}_batch_{num_running}", samples, "ms", "lower", TARGETS_MS[path])
            for (path, num_running, num_tokens), samples in self._exposed_ms.items()
        ]


async def _beside(gateway: Gateway, path: Path, num_running: int, prompts: PromptMaker) -> dict[int, float]:
    """Exposed milliseconds by prompt length, while so many streams decode."""
    batch = [prompts.make(BATCH_PROMPT_TOKENS) for _ in range(num_running)]
    async with running_streams(gateway, batch, BATCH_MAX_TOKENS, with_token_ids=False):
        return await _handoffs(gateway, path, prompts)


async def _handoffs(gateway: Gateway, path: Path, prompts: PromptMaker) -> dict[int, float]:
    exposed = {}
    for num_tokens in PROMPT_TOKENS:
        stream = await gateway.complete(prompts.make(num_tokens), MAX_TOKENS)
        exposed[num_tokens] = exposed_ms(await gateway.timeline(stream.request_id), path)
    return exposed


def exposed_ms(timeline: RequestTimeline, path: Path) -> float:
    """Raises ProtocolError when the KV did not go over that path."""
    if timeline.transfer is None or timeline.transfer.path != path:
        raise ProtocolError(f"a handoff over {path} was asked for; the timeline says {timeline}")
    return timeline.transfer.exposed_ms
