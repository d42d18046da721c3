"""Router and real workers, with the fake engine, in one process: clients that leave, and many small requests.

Known fault 6: the client is gone, work and KV stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from api_bodies import completion
from scripted_worker import until
from worker_rig import SECRET, Rig, Times, small_config, workers

from kv_transport.inproc_faults import FaultPlan
from pd_core.config import DecodeConfig, PrefillConfig, RouterConfig
from pd_core.request_life import RequestLife, RequestState
from pd_model.fake import fake_model
from router.service import RouterService

NUM_EACH = 20
"""Streamed, and as many that are not."""
CLEAN_S = 1.0
MAX_GROWTH_BYTES = 20 << 20


class System:
    """A router before the two workers of a rig."""

    def __init__(self, rig: Rig, router: RouterService, host: str, port: int) -> None:
        self.rig = rig
        self.router = router
        self.host = host
        self.port = port

    @property
    def lives(self) -> list[RequestLife]:
        return [run.life for run in self.router.serving._runs.values()]

    @property
    def num_tokens_made(self) -> float:
        return sum(
            worker.shell.counters.values()[name]
            for worker in (self.rig.prefill, self.rig.decode)
            for name in ("prefill_tokens_total", "decode_tokens_total", "steps_total")
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)


@contextlib.asynccontextmanager
async def system(
    path: str = "tcp", *, max_running: int = 8, times: Times | None = None, faults: FaultPlan | None = None
) -> AsyncIterator[System]:
    config = small_config(
        router=RouterConfig(port=0, max_queue=200),
        prefill=PrefillConfig(num_blocks=2048, chunk_tokens=32, max_running=max_running),
        decode=DecodeConfig(num_blocks=2048, max_batch=2 * NUM_EACH, max_reserved=2 * NUM_EACH),
    )
    async with workers(path, config, times=times, faults=faults) as rig:
        router = RouterService(config, SECRET, fake_model())
        host, port = await router.start()
        try:
            await router.set_workers([rig.prefill_end, rig.decode_end])
            await until(lambda: router.ready()["ready"], within_s=5.0)
            yield System(rig, router, host, port)
        finally:
            await router.stop(grace_s=0.2)


def request(body: dict[str, object]) -> bytes:
    content = msgspec.json.encode(body)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(content)
    return head + content


def in_states(*states: RequestState) -> Callable[[System], int]:
    return lambda on: sum(life.state in states for life in on.lives)


def in_handoff(on: System) -> int:
    """Prefill has drawn the first token, and decode has not taken the KV over."""
    return sum(life.state is RequestState.DECODING and not life.is_committed for life in on.lives)


def after_three_tokens(on: System) -> int:
    return sum(run.timeline.num_tokens >= 3 for run in on.router.serving._runs.values())


@pytest.mark.parametrize(
    ("path", "max_running", "times", "num_there", "are_there"),
    [
        ("tcp", 1, Times(prefill_chunk_s=0.5), 2 * NUM_EACH - 3, in_states(RequestState.QUEUED)),
        ("tcp", 8, Times(prefill_chunk_s=0.2), 1, in_states(RequestState.PREFILLING)),
        ("inproc", 8, Times(), 1, in_handoff),
        ("tcp", 8, Times(decode_step_s=0.02), 2 * NUM_EACH, after_three_tokens),
    ],
    ids=["in the queue", "in prefill", "between prefill and decode", "after three tokens"],
)
async def test_when_forty_clients_leave_nothing_is_computed_for_them_any_more(
    path: str, max_running: int, times: Times, num_there: int, are_there: Callable[[System], int]
) -> None:
    slow_transfer = FaultPlan(random.Random(1), delay=1.0, delay_s=1.0) if path == "inproc" else None
    async with system(path, max_running=max_running, times=times, faults=slow_transfer) as on:
        writers = []
        for number in range(2 * NUM_EACH):
            _, writer = await on.connect()
            body = completion(f"{number:02} " + "x" * 60, max_tokens=500, ignore_eos=True, stream=number % 2 == 0)
            writer.write(request(body))
            writers.append(writer)
        await until(lambda: len(on.lives) == len(writers), within_s=5.0)
        await until(lambda: are_there(on) >= num_there, within_s=20.0)
        for number, writer in enumerate(writers):
            if number % 4 < 2:
                writer.transport.abort()
            else:
                writer.close()
        serving = on.router.serving
        await until(lambda: serving.num_running == serving.num_waiting == 0, within_s=CLEAN_S)
        await until(lambda: on.rig.prefill.num_running == on.rig.decode.num_running == 0, within_s=CLEAN_S)
        made = on.num_tokens_made
        await asyncio.sleep(0.2)
        assert on.num_tokens_made == made
        await on.rig.wait_idle()
        assert [timeline.outcome for timeline in serving.recent] == ["cancelled"] * len(writers)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def ask_again_and_again(on: System, remaining: list[int]) -> None:
    """One client on one connection, until nothing remains."""
    reader, writer = await on.connect()
    while remaining:
        number = remaining.pop()
        small = {"n": 3, "max_tokens": 2} if number % 8 == 0 else {"max_tokens": 1}
        writer.write(request(completion("hello", ignore_eos=True, **small)))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        reply = json.loads(await reader.readexactly(length))
        assert reply["usage"]["completion_tokens"] == (6 if number % 8 == 0 else 1)
    writer.close()


async def many_small_requests(on: System, num_requests: int) -> None:
    remaining = list(range(num_requests))
    await asyncio.gather(*(ask_again_and_again(on, remaining) for _ in range(16)))


@pytest.mark.parametrize(
    ("num_before", "num_after"),
    [(800, 1_200), pytest.param(5_000, 15_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_many_small_requests_leave_no_memory_behind(num_before: int, num_after: int) -> None:
    async with system() as on:
        await many_small_requests(on, num_before)
        before_bytes = rss_bytes()
        await many_small_requests(on, num_after)
        assert rss_bytes() - before_bytes < MAX_GROWTH_BYTES
        await on.rig.wait_idle()
