"""The machine's own bounds as checks, measured in the run of the bench that prints them, while nothing else runs."""

from __future__ import annotations

from collections.abc import Sequence

from load_tests.engine_client import engine_process
from load_tests.engine_messages import RateName
from load_tests.lab import Lab
from load_tests.report import Check, judged

NUM_TIMES = 5
GIGA = 1e9
UNITS: dict[RateName, str] = {"read": "GB/s", "gemm": "GFLOP/s", "memcpy": "GB/s", "digest": "GB/s"}
THREADED: tuple[RateName, ...] = ("read", "gemm")
"""These use as many threads as they are told; the others are one thread's work."""


async def measure_bounds(lab: Lab) -> list[Check]:
    """Read bandwidth and GEMM rate with one thread and with one for each core, memcpy, digest."""
    lab.progress("measuring the machine's own bounds")
    async with engine_process(lab.cores) as client:
        checks = []
        for name in UNITS:
            if name == "gemm" and lab.shape is None:
                continue
            for num_threads in sorted({1, len(lab.cores)}) if name in THREADED else [1]:
                rates = await client.measure_rate(name, lab.shape, num_threads, NUM_TIMES)
                checks.append(bound(name, num_threads, rates))
        return checks


def bound(name: RateName, num_threads: int, per_s: Sequence[float]) -> Check:
    """One bound of the report."""
    threads = f"_{num_threads}_thread{'s' if num_threads > 1 else ''}" if name in THREADED else ""
    return judged(f"bound_{name}{threads}", [rate / GIGA for rate in per_s], UNITS[name], "higher")
