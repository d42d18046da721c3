"""The actors' plain classes, without Ray: from a config to tokens, and to nothing left."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import no_leaks
from worker_rig import SECRET, Rig, check_stream, connect, make_request

from decode_worker.actor import DecodeActor
from pd_core.config import Config, DecodeConfig, FakeEngineConfig, ModelConfig, PrefillConfig
from pd_core.errors import ConfigError
from prefill_worker.actor import PrefillActor

CONFIG = Config(
    model=ModelConfig(path="fake", fake=FakeEngineConfig(context_tokens=256)),
    prefill=PrefillConfig(num_blocks=32, chunk_tokens=32),
    decode=DecodeConfig(num_blocks=32),
)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_two_actors_serve_a_request_log_it_and_leave_nothing(tmp_path: Path, logging_as_before: None) -> None:
    cores = sorted(os.sched_getaffinity(0))
    log_path = tmp_path / "workers.jsonl"
    prefill = PrefillActor("prefill-0", "p-boot", SECRET, CONFIG, cores, str(tmp_path), str(log_path))
    decode = DecodeActor("decode-0", "d-boot", SECRET, CONFIG, cores, str(tmp_path), str(log_path))
    async with no_leaks():
        ends = [await prefill.start(), await decode.start()]
        assert [(end.name, end.role, end.incarnation, end.pid) for end in ends] == [
            ("prefill-0", "prefill", "p-boot", os.getpid()),
            ("decode-0", "decode", "d-boot", os.getpid()),
        ]
        running = [asyncio.ensure_future(actor.run_until_stopped()) for actor in (prefill, decode)]
        assert prefill._worker is not None
        assert decode._worker is not None
        for actor in (prefill, decode):
            engine_thread = actor._worker.shell.engine_thread._thread.native_id  # type: ignore[union-attr]
            assert os.getpriority(os.PRIO_PROCESS, engine_thread) > os.getpriority(os.PRIO_PROCESS, 0)
        clients = [await connect(end) for end in ends]
        run = Rig(prefill._worker, decode._worker, *ends, *clients).run(make_request("r1", 70, 9))
        await run.tokens()
        check_stream(run)
        for client in clients:
            await client.close()
        assert not any(task.done() for task in running)
        await asyncio.gather(prefill.stop(1.0), decode.stop(1.0), *running)
        await prefill.stop(0.0)  # a second time does no harm
    lines = [json.loads(line) for line in log_path.read_text().splitlines()]
    messages = {line["message"] for line in lines if line.get("request_id") == "r1"}
    assert {
        "ticket issued for 5 blocks",
        "prompt of 70 tokens admitted",
        "handoff committed",
        "request over",
    } <= messages


async def test_an_actor_that_cannot_start_says_why_and_stops_all_the_same(logging_as_before: None) -> None:
    async with no_leaks():
        actor = DecodeActor("decode-0", "boot", SECRET, Config(model=CONFIG.model), [], "/nowhere", None)
        with pytest.raises(ConfigError, match=r"decode\.num_blocks"):
            await actor.start()
        await actor.stop(0.0)
