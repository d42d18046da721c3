"""A real model whose sequences are preempted again and again gives the very tokens that it gives undisturbed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_engine import TINY_MANIFEST, tiny_engine
from worker_rig import CALL_S, CHUNK_TOKENS, SECRET, connect, small_config

from decode_worker.worker import DecodeWorker
from kv_transport.inproc import InprocBlockReceiver, InprocNetwork
from pd_core.config import DecodeConfig
from pd_core.errors import Overloaded
from pd_core.layout import BLOCK_TOKENS, DType
from pd_core.messages import Preempted, StartBoth, TokenMade
from pd_core.request import GenerateRequest, SamplingParams
from pd_rpc.client import RpcClient
from pd_worker.memory import PoolMemory

B = BLOCK_TOKENS
SHARED_BLOCKS = 16
AMPLE_BLOCKS = 100


def requests() -> list[GenerateRequest]:
    """Six whose growth together is far more than the small pool, half of them drawn at random."""
    made = []
    for number in range(6):
        tokens = [(7 * place + 13 * number) % TINY_MANIFEST.vocab_size for place in range(9 + 5 * number)]
        sampling = SamplingParams(temperature=0.9 if number % 2 else 0.0, seed=number)
        made.append(GenerateRequest(f"r{number}", tokens, 5 * B, sampling))
    return made


async def generate(client: RpcClient, request: GenerateRequest) -> tuple[list[int], int]:
    """Its tokens, and how often it was preempted. Comes again when there is no room yet."""
    while True:
        try:
            return await placed(client, request)
        except Overloaded:
            await asyncio.sleep(0.005)


async def placed(client: RpcClient, request: GenerateRequest) -> tuple[list[int], int]:
    tokens: list[int] = []
    num_preempted = 0
    async with client.stream(StartBoth(request, 1), CALL_S) as messages:
        async for message in messages:
            match message:
                case TokenMade(index=index, token=token):
                    assert index == len(tokens)
                    tokens.append(token)
                case Preempted(num_made=num_made):
                    assert num_made == len(tokens)
                    num_preempted += 1
    return tokens, num_preempted


async def tokens_of_all(folder: Path, dtype: DType, num_blocks: int) -> tuple[list[list[int]], int]:
    """All requests at once on one worker; their tokens, and how many preemptions there were."""
    engine = tiny_engine(folder, dtype, num_blocks=num_blocks)
    memory = PoolMemory(num_blocks, engine.fingerprint.layout.block_bytes)  # for transfers, of which there is none
    worker = DecodeWorker(
        name="decode-0",
        incarnation="boot",
        secret=SECRET,
        config=small_config(decode=DecodeConfig(num_blocks=num_blocks, prompt_chunk_tokens=CHUNK_TOKENS)),
        engine=engine,
        memory=memory,
        transport=lambda memory, identity: InprocBlockReceiver(InprocNetwork(), memory, engine.fingerprint),
    )
    client = await connect(await worker.start())
    try:
        outcomes = await asyncio.gather(*(generate(client, request) for request in requests()))
        worker.roster.validate()
        assert worker.shell.ledger.counts().is_idle
    finally:
        await client.close()
        await worker.stop(0.0)
        memory.close()
    return [tokens for tokens, _ in outcomes], sum(times for _, times in outcomes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_tokens_of_preempted_sequences_are_those_of_an_undisturbed_run(tmp_path: Path, dtype: DType) -> None:
    undisturbed, num_preempted = await tokens_of_all(tmp_path, dtype, AMPLE_BLOCKS)
    assert num_preempted == 0
    under_pressure, num_preempted = await tokens_of_all(tmp_path, dtype, SHARED_BLOCKS)
    assert num_preempted >= 2
    assert under_pressure == undisturbed
    assert len({tuple(tokens) for tokens in undisturbed}) == len(undisturbed)
