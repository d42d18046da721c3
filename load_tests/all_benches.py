"""The benches that there are, by name, in the order in which they run."""

from __future__ import annotations

from load_tests.engine_bench import EngineBench
from load_tests.fairness_bench import FairnessBench
from load_tests.handoff_bench import HandoffBench
from load_tests.lab import Bench
from load_tests.mixed_bench import MixedBench
from load_tests.pools_bench import PoolsBench
from load_tests.router_bench import RouterBench
from load_tests.serving_bench import ServingBench
from load_tests.transfer_bench import TransferBench
from load_tests.ttft_bench import TtftBench


def all_benches() -> dict[str, Bench]:
    benches: list[Bench] = [
        EngineBench(),
        TtftBench(),
        TransferBench(),
        HandoffBench(),
        ServingBench(),
        RouterBench(),
        FairnessBench(),
        PoolsBench(),
        MixedBench(),
    ]
    return {bench.name: bench for bench in benches}
