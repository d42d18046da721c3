"""handoff: how long decode waits for KV after the first token is there.

Measured: the exposed handoff, from the moment when the router has the first token, which the prefill worker sends off
before it does anything else, until the router knows that the decode worker has committed and may run its first step
(`exposed_ms` of the request's timeline). Both moments are of the router's clock, and both have one message's way in
them. Between them lie the digests and the push of the last chunk's blocks, their check on arrival, and the commit.
Prompts of 64, 512 and 2,048 tokens over shared memory and over TCP, with an idle decode worker and beside four running
streams; over TCP with an idle decode worker also 4,000. There it is judged by the wire time of the last chunk: what the
TCP path, without digests, needs for as many blocks between two processes on the same cores, measured in the same round.

Boundary: pushes of all chunks but the last run beside the next chunk and are hidden; what they cost shows in `ttft`.
The two clusters, one for each path, stand side by side; one works at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Literal

from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.prompts import PromptMaker
from load_tests.report import Check, judged
from load_tests.request_timeline import RequestTimeline
from load_tests.streams import running_streams
from load_tests.summary import median
from load_tests.transfer_pair import TransferPair, transfer_pair
from load_tests.transfer_ways import Shape, way_named
from pd_core.errors import ProtocolError
from pd_core.layout import BLOCK_TOKENS, blocks_for

Path = Literal["shm", "tcp"]

TARGETS_MS: dict[Path, float] = {"shm": 5.0, "tcp": 15.0}
PROMPT_TOKENS = (64, 512, 2048)
JUDGED_TOKENS = (512, 2048, 4000)
JUDGED: tuple[Path, int] = ("tcp", 0)
"""With that path, beside so many streams, the wire time is measured too."""
WIRE = way_named("tcp_no_digests")
WIRE_FACTOR = 1.5
BEYOND_WIRE_MS = 3.0
NUM_PUSHES = 5
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
            wire = WireTimes(await stack.enter_async_context(transfer_pair(lab.cores)))
            for path, gateway in gateways.items():
                await _handoffs(gateway, path, prompts, PROMPT_TOKENS)
            for number in lab.rounds():
                for path in sorted(gateways, reverse=bool(number % 2)):
                    for num_running in BATCHES:
                        lab.progress(
                            f"handoff round {number + 1} of {lab.num_rounds}: {path}, beside {num_running} streams"
                        )
                        timelines = await _beside(gateways[path], path, num_running, prompts)
                        samples.add(path, num_running, timelines)
                        if (path, num_running) == JUDGED:
                            samples.add_wire({size: await wire.measure_ms(timelines[size]) for size in JUDGED_TOKENS})
        return bounds + samples.checks()


class WireTimes:
    """What the TCP path needs for the last chunk of a handoff, between two processes that do nothing else."""

    def __init__(self, pair: TransferPair) -> None:
        self._pair = pair
        self._opened: set[Shape] = set()

    async def measure_ms(self, timeline: RequestTimeline) -> float:
        """The median of NUM_PUSHES. Raises EngineError, DeadlineExceeded, ProtocolError."""
        shape = last_chunk(timeline)
        if shape not in self._opened:
            await self._pair.open(WIRE, shape)
            self._opened.add(shape)
        return median([await self._pair.measure_s(WIRE, shape) for _ in range(NUM_PUSHES)]) * 1e3


class HandoffSamples:
    """Milliseconds of all rounds: exposed by path, running streams and prompt; on the wire by prompt."""

    def __init__(self) -> None:
        self._exposed_ms: defaultdict[tuple[Path, int, int], list[float]] = defaultdict(list)
        self._wire_ms: defaultdict[int, list[float]] = defaultdict(list)

    def add(self, path: Path, num_running: int, timelines: Mapping[int, RequestTimeline]) -> None:
        for num_tokens, timeline in timelines.items():
            self._exposed_ms[path, num_running, num_tokens].append(exposed_ms(timeline, path))

    def add_wire(self, wire_ms: Mapping[int, float]) -> None:
        for num_tokens, milliseconds in wire_ms.items():
            self._wire_ms[num_tokens].append(milliseconds)

    def checks(self) -> list[Check]:
        exposed = [
            judged(f"{path}_exposed_{num_tokens}_batch_{num_running}", samples, "ms", "lower", TARGETS_MS[path])
            for (path, num_running, num_tokens), samples in self._exposed_ms.items()
        ]
        return exposed + [check for num_tokens in self._wire_ms for check in self._wire_checks(num_tokens)]

    def _wire_checks(self, num_tokens: int) -> list[Check]:
        """The wire time of the last chunk, and how far the exposed handoff lies above what that allows."""
        path, num_running = JUDGED
        wire_ms = self._wire_ms[num_tokens]
        beyond_ms = [
            exposed - (WIRE_FACTOR * wire + BEYOND_WIRE_MS)
            for exposed, wire in zip(self._exposed_ms[path, num_running, num_tokens], wire_ms, strict=True)
        ]
        return [
            judged(f"{path}_wire_{num_tokens}", wire_ms, "ms", "lower"),
            judged(f"{path}_exposed_{num_tokens}_beyond_limit", beyond_ms, "ms", "lower", 0.0),
        ]


async def _beside(gateway: Gateway, path: Path, num_running: int, prompts: PromptMaker) -> dict[int, RequestTimeline]:
    """Handoffs while so many streams decode."""
    batch = [prompts.make(BATCH_PROMPT_TOKENS) for _ in range(num_running)]
    sizes = sorted({*PROMPT_TOKENS, *(JUDGED_TOKENS if (path, num_running) == JUDGED else ())})
    async with running_streams(gateway, batch, BATCH_MAX_TOKENS, with_token_ids=False):
        return await _handoffs(gateway, path, prompts, sizes)


async def _handoffs(
    gateway: Gateway, path: Path, prompts: PromptMaker, sizes: Sequence[int]
) -> dict[int, RequestTimeline]:
    """Timelines by prompt length. Raises ProtocolError when the KV did not go over that path."""
    timelines = {}
    for num_tokens in sizes:
        stream = await gateway.complete(prompts.make(num_tokens), MAX_TOKENS)
        timelines[num_tokens] = await gateway.timeline(stream.request_id)
        exposed_ms(timelines[num_tokens], path)
    return timelines


def exposed_ms(timeline: RequestTimeline, path: Path) -> float:
    """Raises ProtocolError when the KV did not go over that path."""
    if timeline.transfer is None or timeline.transfer.path != path:
        raise ProtocolError(f"a handoff over {path} was asked for; the timeline says {timeline}")
    return timeline.transfer.exposed_ms


def last_chunk(timeline: RequestTimeline) -> Shape:
    """The blocks that the last chunk has filled. Raises ProtocolError for a timeline without chunks or transfer."""
    if timeline.prefill is None or not timeline.prefill.chunks or timeline.transfer is None:
        raise ProtocolError(f"no chunks and their transfer in the timeline {timeline}")
    chunk = timeline.prefill.chunks[-1]
    num_all = blocks_for(chunk.start + chunk.num_tokens)
    num_blocks = num_all - chunk.start // BLOCK_TOKENS
    return Shape(f"{num_blocks}_blocks", num_blocks, timeline.transfer.num_bytes // num_all)
