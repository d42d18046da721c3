"""Prompts that end at, before and after every edge there is: right, twice, with exact counts."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from decode_worker.worker import DecodeWorker
from kv_transport.choice import RoutedSender
from kv_transport.tcp_receiver import TcpBlockReceiver
from kv_transport.tcp_sender import TcpBlockSender
from pd_core.config import Config, parse_config
from pd_core.engine import Engine
from pd_core.layout import DType
from pd_core.request import FinishReason, GenerateRequest, SamplingParams
from pd_engine.loader import load_engine, plan_engine
from pd_engine.reference import generate_alone
from pd_model.assets import assets_of
from pd_model.folder import ModelFolder, default_cache_dir
from pd_worker.memory import PoolMemory
from prefill_worker.worker import PrefillWorker
from router.service import RouterService

B = 16
CHUNK = 4 * B
LENGTHS = (1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, CHUNK - 1, CHUNK, CHUNK + 1)
MAX_TOKENS = (1, 2, B + 1)
SECRET = b"a secret of the tests, long enough"


def config_of(dtype: DType) -> Config:
    return parse_config(
        {
            "model": {"dtype": dtype},
            "router": {"port": 0, "max_queue": 1000, "queue_timeout_s": 600.0},
            "prefill": {"num_blocks": 64, "chunk_tokens": CHUNK},
            "decode": {"num_blocks": 128},
        }
    )


class Rig:
    """Router and both workers with the real model, in this process, over real sockets."""

    def __init__(self, config: Config, folder: ModelFolder) -> None:
        self.folder = folder
        self.memories: list[PoolMemory] = []
        self.engines: list[Engine] = []
        plan = plan_engine(folder, config.model.dtype, default_cache_dir())
        for num_blocks in (config.prefill.num_blocks, config.decode.num_blocks):
            assert num_blocks is not None
            memory = PoolMemory(num_blocks, plan.layout.block_bytes)
            self.memories.append(memory)
            self.engines.append(load_engine(plan, memory, num_threads=1))
        self.prefill = PrefillWorker(
            name="prefill-0",
            incarnation="prefill-boot",
            secret=SECRET,
            config=config,
            engine=self.engines[0],
            memory=self.memories[0],
            transport=lambda memory, identity: RoutedSender({"tcp": TcpBlockSender(memory, identity, SECRET)}),
        )
        self.decode = DecodeWorker(
            name="decode-0",
            incarnation="decode-boot",
            secret=SECRET,
            config=config,
            engine=self.engines[1],
            memory=self.memories[1],
            transport=lambda memory, identity: TcpBlockReceiver(memory, identity, SECRET, host="127.0.0.1"),
        )
        self.router = RouterService(config, SECRET, assets_of(folder))

    async def start(self) -> None:
        endpoints = [await self.prefill.start(), await self.decode.start()]
        await self.router.start()
        await self.router.set_workers(endpoints)
        async with asyncio.timeout(10):
            while not self.router.ready()["ready"]:
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        await self.router.stop(1.0)
        await self.prefill.stop(1.0)
        await self.decode.stop(1.0)

    async def generate(self, request: GenerateRequest) -> tuple[list[int], FinishReason | None]:
        events = [event async for event in self.router.serving.generate(request)]
        assert [event.index for event in events] == list(range(len(events)))
        assert all(event.finish is None for event in events[:-1])
        return [event.token for event in events], events[-1].finish

    def alone(self, request: GenerateRequest) -> list[int]:
        """By REF; the workers must have stopped."""
        return generate_alone(self.engines[0], request, 48, range(self.memories[0].num_blocks))


@pytest.fixture(params=["bfloat16", "float32"])
async def rig(request: pytest.FixtureRequest, model_folder: ModelFolder) -> AsyncIterator[Rig]:
    made = Rig(config_of(request.param), model_folder)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # two engines in one process: by default each waits 5 ms for the other at every call
    await made.start()
    yield made
    sys.setswitchinterval(switch_s)
    made.engines.clear()
    for memory in made.memories:
        memory.close()


@pytest.mark.timeout(240)
async def test_every_prompt_length_and_token_count_is_right_twice(rig: Rig) -> None:
    chance = random.Random(11)
    requests = [
        GenerateRequest(
            f"{length} tokens, {max_tokens} more",
            [chance.randrange(3, rig.folder.manifest.vocab_size) for _ in range(length)],
            max_tokens,
            SamplingParams(temperature=0.8 * (number % 2), seed=length),
        )
        for number, (length, max_tokens) in enumerate(itertools.product(LENGTHS, MAX_TOKENS))
    ]
    try:
        answers = await asyncio.gather(
            *(
                rig.generate(msgspec.structs.replace(request, request_id=f"{request.request_id}, {again}"))
                for request in requests
                for again in ("once", "twice")
            )
        )
    finally:
        await rig.stop()
    assert rig.prefill.shell.ledger.counts().is_idle
    assert rig.decode.shell.ledger.counts().is_idle
    for request, once, twice in zip(requests, answers[::2], answers[1::2], strict=True):
        assert once == twice == (rig.alone(request), FinishReason.LENGTH), request.request_id
