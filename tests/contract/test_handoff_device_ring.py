"""Handoffs between workers whose pools lie on a "device": all blocks go through rings of few slots, over real paths.

The device's copies move their bytes as late as they may. So a slot or a block that is used before its copy has ended
shows: as a wrong token, as bytes that no token can have made, or as a digest that does not fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from late_copies import HeldCopies, LateCopies, MemoryCopies
from tiny_engine import TINY_MANIFEST, write_tiny_weights
from waiting import until
from worker_rig import (
    CONTEXT_TOKENS,
    SECRET,
    Rig,
    Run,
    connect,
    make_request,
    outcome_of,
    small_config,
    workers,
)

from decode_worker.worker import DecodeWorker
from kv_transport.paths import make_receiver, make_sender
from pd_core.config import Config, DecodeConfig, PrefillConfig
from pd_core.device_copies import DeviceCopies
from pd_core.engine import Engine
from pd_core.errors import KvrelayError, WorkerLost
from pd_core.layout import DType, Fingerprint
from pd_core.memory import BlockMemory
from pd_core.request import GenerateRequest, SamplingParams
from pd_engine.decoder import Decoder
from pd_engine.device import CPU
from pd_engine.device_copies import copies_for
from pd_engine.fake import DECODE_FACTOR, FAKE_LAYOUT, PREFILL_FACTOR, FakeEngine
from pd_engine.invariance import InvarianceProof
from pd_engine.kernels import kernel_named
from pd_engine.loader import torch_layout
from pd_engine.pool import DeviceKvPool, KvPool, torch_dtype
from pd_engine.reference import generate_alone
from pd_engine.scratch import ScratchMemory
from pd_engine.torch_engine import TorchEngine
from pd_engine.weights import read_weights
from pd_worker.device_ring import DeviceRing, call_soon
from pd_worker.memory import PoolMemory
from pd_worker.worker_pool import WorkerPool
from prefill_worker.worker import PrefillWorker

RINGS = [1, 2, 9]
LATE_S = 0.0005

MakeEngine = Callable[[str, int], tuple[Engine, int, Callable[[BlockMemory], DeviceCopies]]]
"""The role's engine with a pool of so many blocks, their size, and what copies between that pool and given slots."""


def fake_engine(role: str, num_blocks: int) -> tuple[Engine, int, Callable[[BlockMemory], DeviceCopies]]:
    device = ScratchMemory(num_blocks, FAKE_LAYOUT.block_bytes)
    device.buffer[:] = b"\xfe" * len(device.buffer)  # what nobody has written must not pass for KV
    factor = PREFILL_FACTOR if role == "prefill" else DECODE_FACTOR
    engine = FakeEngine(factor, device, context_tokens=CONTEXT_TOKENS)
    return engine, FAKE_LAYOUT.block_bytes, lambda slots: MemoryCopies(device, slots)


Trick = Callable[[str, DeviceCopies], DeviceCopies]
"""Given a role and the copies of its device, those that its ring gets."""


def late(_: str, copies: DeviceCopies) -> DeviceCopies:
    return LateCopies(copies, LATE_S)


@contextlib.asynccontextmanager
async def ring_workers(
    path: str, num_slots: int, config: Config | None = None, make_engine: MakeEngine = fake_engine, trick: Trick = late
) -> AsyncIterator[Rig]:
    """As worker_rig.workers, with a ring of `num_slots` slots beside each pool; at the end all blocks and slots must
    have come back."""
    async with workers_and_rings(path, num_slots, config or small_config(), make_engine, trick) as (rig, rings):
        yield rig
        await rig.to_prefill.close()
        await rig.to_decode.close()
        await until(lambda: rig.is_idle, rig.decode.shell.config.transfer.lease_s + 2.0)
        for worker in (rig.prefill, rig.decode):
            worker.shell.ledger.validate()
        await until(lambda: all(ring.slots.num_free == num_slots for ring in rings))
        for ring in rings:
            ring.slots.validate()


@contextlib.asynccontextmanager
async def workers_and_rings(
    path: str, num_slots: int, config: Config, make_engine: MakeEngine, trick: Trick
) -> AsyncIterator[tuple[Rig, list[DeviceRing]]]:
    """Started as the actors start them, connected, and stopped at the end."""
    transfer = msgspec.structs.replace(config.transfer, path=path)
    config = msgspec.structs.replace(config, transfer=transfer)
    engines, rings = {}, {}
    for role, num_blocks in (("prefill", config.prefill.num_blocks), ("decode", config.decode.num_blocks)):
        engines[role], block_bytes, make_copies = make_engine(role, num_blocks)
        memory = PoolMemory(num_slots, block_bytes)
        memory.buffer[:] = b"\xfd" * len(memory.buffer)
        rings[role] = DeviceRing(memory, trick(role, make_copies(memory)), num_blocks)
    prefill_pool, decode_pool = (WorkerPool(ring.memory, ring) for ring in rings.values())
    prefill = PrefillWorker(
        name="prefill-0",
        incarnation="prefill-boot",
        secret=SECRET,
        config=config,
        engine=engines["prefill"],
        memory=prefill_pool.memory,
        blocks=prefill_pool.blocks,
        transport=lambda _, identity: make_sender(prefill_pool.memory, identity, SECRET, transfer),
    )
    decode = DecodeWorker(
        name="decode-0",
        incarnation="decode-boot",
        secret=SECRET,
        config=config,
        engine=engines["decode"],
        memory=decode_pool.memory,
        pool=decode_pool.landing,
        transport=lambda memory, identity: make_receiver(memory, identity, SECRET, transfer, decode_pool.landing),
    )
    for worker, pool in ((prefill, prefill_pool), (decode, decode_pool)):
        pool.start(partial(call_soon, asyncio.get_running_loop(), worker.shell.fail))
    prefill_end, decode_end = await prefill.start(), await decode.start()
    to_prefill, to_decode = await connect(prefill_end), await connect(decode_end)
    rig = Rig(prefill, decode, prefill_end, decode_end, to_prefill, to_decode)
    try:
        yield rig, list(rings.values())
    finally:
        await to_prefill.close()
        await to_decode.close()
        await prefill.stop(0.5)
        await decode.stop(0.5)
        prefill_pool.close()
        decode_pool.close()


@pytest.mark.parametrize("num_slots", RINGS)
@pytest.mark.parametrize("path", ["shm", "tcp"])
async def test_prompts_of_many_more_blocks_than_the_rings_have_slots_are_handed_over_whole(
    path: str, num_slots: int
) -> None:
    async with ring_workers(path, num_slots) as rig:
        runs = [rig.run(make_request(f"r{length}", length, 20)) for length in (1, 16, 17, 100, 300)]
        assert await asyncio.gather(*map(outcome_of, runs)) == [None] * len(runs)
        for run in runs:
            assert run.committed is not None
            assert run.committed.path == path
            assert run.ticket is not None
            assert run.ticket.most_frame_blocks == max(1, num_slots // 2)
        assert rig.decode.shell.counters.values()["handoffs_aborted_total"] == 0
        assert rig.decode.extra_counters()["kv_blocks_corrupt_total"] == 0


@pytest.mark.parametrize("num_slots", RINGS)
@pytest.mark.parametrize("path", ["shm", "tcp"])
async def test_aborts_at_random_moments_leave_no_slot_behind_and_touch_no_block_of_others(
    path: str, num_slots: int
) -> None:
    """The pools hold few prompts, so blocks of those that leave are given to others at once."""
    chance = random.Random(f"{path} {num_slots}")
    config = small_config(
        prefill=PrefillConfig(num_blocks=24, chunk_tokens=32, max_running=8),
        decode=DecodeConfig(num_blocks=24, max_batch=8, max_reserved=8),
    )

    async def leave_or_stay(number: int, rig: Rig) -> None:
        for attempt in range(12):
            name = f"r{number}.{attempt}"
            run = rig.run(make_request(name, chance.randrange(1, 150), chance.randrange(1, 12)))
            outcome = asyncio.ensure_future(outcome_or_overload(run))
            if chance.random() < 0.6:
                await asyncio.wait([outcome], timeout=chance.random() * 0.02)
                outcome.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await outcome

    async with ring_workers(path, num_slots, config) as rig:
        await asyncio.gather(*(leave_or_stay(number, rig) for number in range(5)))
        await rig.wait_idle()
        assert await outcome_of(rig.run(make_request("last", 200, 20))) is None
        counted = rig.prefill.shell.counters.values()
        assert counted["handoffs_committed_total"] > 5
        assert counted["requests_cancelled_total"] > 5


async def outcome_or_overload(run: Run) -> KvrelayError | None:
    """Its error when there was no room for it, which happens here; all else must be right."""
    error = await outcome_of(run)
    assert error is None or "Overloaded" in type(error).__name__, error
    return error


def tiny_engines(folder: Path, dtype: DType, pools: dict[str, DeviceKvPool], device: torch.device = CPU) -> MakeEngine:
    """Torch's kernels over pools that are tensors beside the memory which the transports see; `pools` has them then."""
    write_tiny_weights(folder / "w.safetensors", TINY_MANIFEST, seed=1)

    def make(role: str, num_blocks: int) -> tuple[Engine, int, Callable[[BlockMemory], DeviceCopies]]:
        pool = pools[role] = DeviceKvPool(num_blocks, torch_layout(TINY_MANIFEST, dtype), device)
        return engine_on(folder, dtype, pool), pool.block_bytes, lambda slots: copies_for(pool, slots)

    return make


def engine_on(folder: Path, dtype: DType, pool: KvPool) -> TorchEngine:
    weights = read_weights(folder / "w.safetensors", TINY_MANIFEST, torch_dtype(dtype), pool.device)
    decoder = Decoder(TINY_MANIFEST, weights, kernel_named("sdpa"))
    fingerprint = Fingerprint("tiny", "tiny", "tiny", "tiny", pool.layout)
    return TorchEngine(decoder, pool, fingerprint, InvarianceProof("tiny", "tiny", [], "nothing was tried"), 1)


@pytest.mark.parametrize("num_slots", RINGS)
@pytest.mark.parametrize(("path", "dtype"), [("shm", "bfloat16"), ("tcp", "float32")])
async def test_a_model_gives_the_tokens_that_it_gives_alone_with_its_pool_in_memory(
    path: str, dtype: DType, num_slots: int, tmp_path: Path
) -> None:
    requests = [
        GenerateRequest(
            f"r{number}",
            [(7 * place + 13 * number) % TINY_MANIFEST.vocab_size for place in range(length)],
            8,
            SamplingParams(temperature=0.9 * (number % 2), seed=number),
        )
        for number, length in enumerate((5, 32, 33, 90))
    ]
    async with ring_workers(path, num_slots, make_engine=tiny_engines(tmp_path, dtype, {})) as rig:
        runs = [rig.run(request) for request in requests]
        made = await asyncio.gather(*(run.tokens() for run in runs))
    layout = torch_layout(TINY_MANIFEST, dtype)
    alone = engine_on(tmp_path, dtype, KvPool(ScratchMemory(20, layout.block_bytes), layout))
    assert made == [generate_alone(alone, request, 48, range(20)) for request in requests]


@pytest.mark.parametrize("digests", [True, False])
async def test_one_worker_on_a_device_and_one_in_memory_understand_each_other(digests: bool) -> None:
    """What the rings are is no matter of the wire: each side has its own, or none."""
    config = small_config()
    config = msgspec.structs.replace(config, transfer=msgspec.structs.replace(config.transfer, digests=digests))
    async with ring_workers("tcp", 2, config) as on_device, workers("tcp", config) as plain:
        mixed = Rig(
            on_device.prefill,
            plain.decode,
            on_device.prefill_end,
            plain.decode_end,
            on_device.to_prefill,
            plain.to_decode,
        )
        assert await outcome_of(mixed.run(make_request("there", 300, 10))) is None
        mixed = Rig(
            plain.prefill,
            on_device.decode,
            plain.prefill_end,
            on_device.decode_end,
            plain.to_prefill,
            on_device.to_decode,
        )
        assert await outcome_of(mixed.run(make_request("back", 300, 10))) is None


async def test_a_device_that_fails_ends_the_boot_and_its_requests_are_told() -> None:
    devices: dict[str, HeldCopies] = {}

    def trick(role: str, copies: DeviceCopies) -> DeviceCopies:
        devices[role] = HeldCopies(copies)
        return devices[role]

    async with workers_and_rings("tcp", 4, small_config(), fake_engine, trick) as (rig, _):
        outcome = asyncio.ensure_future(outcome_of(rig.run(make_request("r", 100, 5))))
        await until(lambda: devices["prefill"].num_waiting)
        devices["prefill"].fail(RuntimeError("an illegal memory access"))
        async with asyncio.timeout(5.0):
            failure = await rig.prefill.wait_failed()
            assert "the device failed to copy blocks: an illegal memory access" in failure.message
            assert isinstance(await outcome, WorkerLost)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("path", ["shm", "tcp"])
async def test_blocks_of_a_pool_on_cuda_are_bit_for_bit_in_the_other_pool_on_cuda(path: str, tmp_path: Path) -> None:
    pools: dict[str, DeviceKvPool] = {}
    make_engine = tiny_engines(tmp_path, "bfloat16", pools, torch.device("cuda:0"))
    async with ring_workers(path, 4, make_engine=make_engine, trick=lambda _, copies: copies) as rig:
        run = rig.run(GenerateRequest("r", [place % 100 for place in range(330)], 8, SamplingParams()))
        assert len(await run.tokens()) == 8
        assert run.ticket is not None
        sent = {row.tobytes() for row in pools["prefill"].blocks.cpu().view(torch.uint8).numpy()}
        taken = pools["decode"].blocks[run.ticket.block_ids[:-1]].cpu().view(torch.uint8).numpy()
        assert all(row.tobytes() in sent for row in taken), "decode writes into the last block alone"
