"""transfer: how fast the paths move KV blocks between two processes of this host, and how far from the least possible.

Measured: from the moment when the source begins until the last block is in its place in the target's pool; one block of
64 KiB, of 1 MiB and of 64 MiB, and 100 blocks of 360 KiB. Our paths (the senders and receivers that workers have) with
digests, both passes of which lie in that time, and without; for each its bare pair, the least that any program has to
do to move the bytes so (see transfer_ways); memcpy within one process; the libraries of others where they are
installed. And the time of a control call from worker to worker.

Boundary: no engine, router or ticket protocol around it. Source and target are processes with a core each; the ways of
a family use the same pages, touched before. All ways take turns within a round, forwards and backwards; a round's
sample is the median of NUM_TIMES. Before anything is measured it was seen that the target gets the source's very bytes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack

from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.report import Check
from load_tests.summary import median
from load_tests.transfer_checks import checks_of
from load_tests.transfer_pair import TransferPair, transfer_pair
from load_tests.transfer_ways import FAMILIES, WAYS, Family, Shape, Way
from pd_core.errors import DeadlineExceeded, EngineError

NUM_TIMES = 5
SETTLE_S = 2.0
"""Until pools have been put into huge pages, behind their users."""
REQUIRED: Family = "own"
"""The others may be missing, or fail; the report says so."""


class TransferBench:
    name = "transfer"
    summary = "bytes a second of the paths that move KV, against bare pairs and other libraries"
    num_rounds = 7

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        async with AsyncExitStack() as stack:
            ways = OpenWays(lab.note)
            for family in FAMILIES:
                lab.progress(f"transfer: making {family} ready")
                await ways.open(family, await stack.enter_async_context(transfer_pair(lab.cores)))
            await asyncio.sleep(SETTLE_S)
            for number in lab.rounds():
                lab.progress(f"transfer round {number + 1} of {lab.num_rounds}")
                await ways.run_round()
            return bounds + checks_of(ways.samples)


class OpenWays:
    """The ways that work here, and what was measured of them. note: told why one does not"""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.samples: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._note = note
        self._pairs: dict[Way, TransferPair] = {}

    async def open(self, family: Family, pair: TransferPair) -> None:
        """Raises EngineError, DeadlineExceeded for the family that has to be there."""
        for way in WAYS:
            if way.family != family:
                continue
            try:
                for shape in way.shapes:
                    await pair.open(way, shape)
            except (EngineError, DeadlineExceeded) as error:
                self._say_missing(way, error)
            else:
                self._pairs[way] = pair

    async def run_round(self) -> None:
        """Raises as `open`."""
        for shape in dict.fromkeys(shape for way in self._pairs for shape in way.shapes):
            for way, took_s in (await self._measure(shape)).items():
                self.samples[way.name, shape.name].append(median(took_s))

    async def _measure(self, shape: Shape) -> dict[Way, list[float]]:
        """Seconds, NUM_TIMES each, of the ways that did not fail meanwhile."""
        took_s: dict[Way, list[float]] = {way: [] for way in self._pairs if shape in way.shapes}
        for number in range(NUM_TIMES):
            for way in list(took_s)[:: -1 if number % 2 else 1]:
                if way not in self._pairs:
                    continue
                try:
                    took_s[way].append(await self._pairs[way].measure_s(way, shape))
                except (EngineError, DeadlineExceeded) as error:
                    self._say_missing(way, error)
                    self._forget(way.family)
        return {way: seconds for way, seconds in took_s.items() if way in self._pairs}

    def _say_missing(self, way: Way, error: EngineError | DeadlineExceeded) -> None:
        if way.family == REQUIRED:
            raise error
        self._note(f"no figures of {way.name}: {error.message}")

    def _forget(self, family: Family) -> None:
        """What its processes would say now belongs to other questions, and what there is of it is not whole."""
        for way in [way for way in self._pairs if way.family == family]:
            del self._pairs[way]
            for shape in way.shapes:
                self.samples.pop((way.name, shape.name), None)
