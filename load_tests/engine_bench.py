"""engine: the bare engine against what this machine could do at best, and against the kernel prototype.

Measured: prefill of 512, 2,048 and 4,000 tokens and one decode step of 1, 8 and 16 streams at context 512, with two
threads on two cores; each as a share of its floor (see `floor`), whose rates are measured in the same round. And one
thread's prefill as a share of two threads'.

Boundary: from the call of the engine's step to its return, the draw of tokens included: no worker, no queue, no
network. The engine is a process of its own, tied to the cores; rates, steps and the prototype take turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from load_tests.engine_client import EngineClient, engine_process
from load_tests.floor import ModelShape, Rates, decode_floor_s, prefill_floor_s
from load_tests.lab import Lab
from load_tests.machine_bounds import bound
from load_tests.report import Check, judged
from load_tests.summary import median
from pd_core.errors import ConfigError

NUM_THREADS = 2
CHUNK_TOKENS = 512
CONTEXT_TOKENS = 512
PREFILL_TARGETS = {512: 0.95, 2048: 0.88, 4000: 0.82}
DECODE_TARGETS = {1: 0.65, 8: 0.50, 16: 0.45}
ONE_THREAD_TARGET = 0.48
ONE_THREAD_TOKENS = 2048
PROTOTYPE_TARGET = 0.95
NUM_RATE_TIMES = 3
NUM_STEPS = 8
NUM_SHORT_TIMES = 3
"""A prompt of 512 tokens is over so soon that its median of three stands for a round."""
PROTOTYPE_PROGRAM = "load_tests.prototype_process"

Samples = defaultdict[str, list[float]]


class EngineBench:
    name = "engine"
    summary = "prefill and decode of the bare engine as a share of the machine's floor"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        if lab.shape is None:
            raise ConfigError("the fake engine has no floor", param="model.path")
        if len(lab.cores) < NUM_THREADS:
            raise ConfigError(f"the engine bench needs {NUM_THREADS} cores; there are {len(lab.cores)}")
        cores = lab.cores[:NUM_THREADS]
        rounds = EngineRounds(lab.shape)
        async with lab.engine(cores) as both, lab.engine(cores[:1]) as one, _prototype(lab) as prototype:
            await rounds.warm_up([both, one, *([prototype] if prototype is not None else [])])
            for number in lab.rounds():
                lab.progress(f"engine round {number + 1} of {lab.num_rounds}")
                await rounds.run(number, both, one, prototype)
        return rounds.checks()


class EngineRounds:
    """Samples of all rounds. Keys: "prefill 512", "decode 8" and so on."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._rates: Samples = defaultdict(list)
        self._tokens_per_s: Samples = defaultdict(list)
        self._of_floor: Samples = defaultdict(list)
        self._of_prototype: Samples = defaultdict(list)
        self._of_two_threads: list[float] = []

    async def warm_up(self, engines: list[EngineClient]) -> None:
        """Pages, threads and the KV that decode steps read."""
        for engine in engines:
            await engine.time_prefill(CHUNK_TOKENS, CHUNK_TOKENS, seed=0)
        for engine in engines[:1] + engines[2:]:
            await engine.time_decode([CONTEXT_TOKENS] * max(DECODE_TARGETS), 2)

    async def run(self, number: int, both: EngineClient, one: EngineClient, prototype: EngineClient | None) -> None:
        rates = await self._measure_rates(both)
        for num_tokens in PREFILL_TARGETS:
            name = f"prefill_{num_tokens}"
            took_s, other_s = await _in_turn(number, both, prototype, partial(_prefill, num_tokens, number))
            self._add(name, num_tokens, took_s, other_s)
            self._of_floor[name].append(prefill_floor_s(self._shape, rates, num_tokens) / took_s)
            if num_tokens == ONE_THREAD_TOKENS:
                self._of_two_threads.append(took_s / await _prefill(num_tokens, number, one))
        for num_streams in DECODE_TARGETS:
            name = f"decode_{num_streams}"
            took_s, other_s = await _in_turn(number, both, prototype, partial(_decode, num_streams))
            self._add(name, num_streams, took_s, other_s)
            floor_s = decode_floor_s(self._shape, rates, num_streams, CONTEXT_TOKENS)
            self._of_floor[name].append(floor_s / took_s)

    def checks(self) -> list[Check]:
        targets = {f"prefill_{size}": target for size, target in PREFILL_TARGETS.items()}
        targets |= {f"decode_{size}": target for size, target in DECODE_TARGETS.items()}
        found = [bound("gemm", NUM_THREADS, self._rates["gemm"]), bound("read", NUM_THREADS, self._rates["read"])]
        found += [judged(f"{name}_rate", rates, "token/s", "higher") for name, rates in self._tokens_per_s.items()]
        found += [
            judged(f"{name}_of_floor", shares, "", "higher", targets[name]) for name, shares in self._of_floor.items()
        ]
        name = f"prefill_{ONE_THREAD_TOKENS}_one_thread_of_two"
        found.append(judged(name, self._of_two_threads, "", "higher", ONE_THREAD_TARGET))
        found += [
            judged(f"{name}_of_prototype", shares, "", "higher", PROTOTYPE_TARGET)
            for name, shares in self._of_prototype.items()
        ]
        return found

    async def _measure_rates(self, engine: EngineClient) -> Rates:
        gemm = median(await engine.measure_rate("gemm", self._shape, NUM_THREADS, NUM_RATE_TIMES))
        read = median(await engine.measure_rate("read", self._shape, NUM_THREADS, NUM_RATE_TIMES))
        self._rates["gemm"].append(gemm)
        self._rates["read"].append(read)
        return Rates(flops_per_s=gemm, read_bytes_per_s=read)

    def _add(self, name: str, num_tokens: int, took_s: float, other_s: float | None) -> None:
        self._tokens_per_s[name].append(num_tokens / took_s)
        if other_s is not None:
            self._of_prototype[name].append(other_s / took_s)


async def _in_turn(
    number: int,
    ours: EngineClient,
    theirs: EngineClient | None,
    measure: Callable[[EngineClient], Awaitable[float]],
) -> tuple[float, float | None]:
    """Ours and theirs; who begins changes from round to round."""
    if theirs is None:
        return await measure(ours), None
    if number % 2:
        other_s = await measure(theirs)
        return await measure(ours), other_s
    took_s = await measure(ours)
    return took_s, await measure(theirs)


async def _prefill(num_tokens: int, seed: int, engine: EngineClient) -> float:
    num_times = NUM_SHORT_TIMES if num_tokens <= CHUNK_TOKENS else 1
    return median([await engine.time_prefill(num_tokens, CHUNK_TOKENS, seed) for _ in range(num_times)])


async def _decode(num_streams: int, engine: EngineClient) -> float:
    """One step, at positions from CONTEXT_TOKENS on; the first of them warms the caches for this batch."""
    return median((await engine.time_decode([CONTEXT_TOKENS] * num_streams, NUM_STEPS + 1))[1:])


@asynccontextmanager
async def _prototype(lab: Lab) -> AsyncIterator[EngineClient | None]:
    """The prototype in a process like the engine's; None where no folder was given."""
    if lab.prototype is None:
        yield None
        return
    lab.progress("building the prototype: the first time takes a minute or two")
    cores = lab.cores[:NUM_THREADS]
    async with engine_process(cores, PROTOTYPE_PROGRAM, [str(lab.prototype.resolve())]) as client:
        await client.load(lab.config, len(cores), lab.cache_dir)
        yield client
