"""Known fault 11: a late write lands in blocks that have been given to another request.

The decode pool holds one prompt. A request is given up when half of its blocks have come over a slow way, another
prompt wants the same blocks at once: its tokens are right, always, whichever way KV goes, with digests and without.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from faulty_link import Fault, FaultyLink, FrameFaults
from waiting import until
from worker_rig import CHUNK_TOKENS, HANDOFF_PATHS, Rig, Times, failure_of, make_request, small_config, workers

from kv_transport.inproc_faults import FaultPlan
from kv_transport.shm_pool import copy_block
from pd_core.config import Config, DecodeConfig
from pd_core.errors import Overloaded, TransferError
from pd_engine.fake import FAKE_LAYOUT

PROMPT = 3 * CHUNK_TOKENS + 5
PROMPT_BLOCKS = 7
SLOW = {"tcp": [Fault.DELAY, Fault.DELAY, Fault.DUPLICATE, Fault.SWAP], "ucx": [Fault.DELAY]}
"""Over ucx it is their talk that goes through the link, of which no word may come twice."""


class Detour:
    """The receiver, whose writers are sent another way."""

    def __init__(self, receiver: Any, link: FaultyLink) -> None:
        self._receiver = receiver
        self.addresses = [link.address]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)


@contextlib.asynccontextmanager
async def slow_way(path: str, config: Config, generator: random.Random) -> AsyncIterator[Rig]:
    """Two workers; frames are late, split, doubled and out of order, and over shared memory every copy is slow."""
    plan = FaultPlan(generator, delay=0.5, stall=0.3, reorder=0.3, duplicate=0.3, delay_s=0.02, stall_s=0.01)
    async with workers(path, config, faults=plan, times=Times(prefill_chunk_s=0.002)) as rig:
        receiver: Any = rig.decode._receiver
        if path == "inproc":
            yield rig
            return
        if path == "shm":  # a frame of the kernel's own cannot be late, but a copy can
            receiver._listeners[0]._copy = _copy_slowly
            yield rig
            return
        faults = FrameFaults(generator, SLOW[path])
        faults.rate = 0.5
        link = FaultyLink(receiver.addresses[0], faults)
        rig.decode._handoffs.receiver = Detour(receiver, link)  # type: ignore[assignment]
        try:
            yield rig
        finally:
            await asyncio.to_thread(link.close)


def _copy_slowly(source: memoryview, into: memoryview) -> None:
    half = len(into) // 2
    copy_block(source[:half], into[:half])
    time.sleep(0.003)
    copy_block(source[half:], into[half:])


@pytest.mark.parametrize("path", HANDOFF_PATHS)
@pytest.mark.parametrize("with_digests", [True, False], ids=["digests", "no digests"])
@pytest.mark.parametrize("num_loops", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_the_prompt_that_gets_the_blocks_of_one_that_was_given_up_half_way_is_always_right(
    path: str, with_digests: bool, num_loops: int
) -> None:
    config = small_config(decode=DecodeConfig(num_blocks=PROMPT_BLOCKS, max_batch=4, max_reserved=4))
    transfer = msgspec.structs.replace(config.transfer, digests=with_digests)
    num_late = 0
    async with slow_way(path, msgspec.structs.replace(config, transfer=transfer), random.Random(3)) as rig:
        half = PROMPT_BLOCKS // 2 * FAKE_LAYOUT.block_bytes
        for number in range(num_loops):
            before = rig.decode.extra_counters()["kv_bytes_received_total"]
            left = rig.run(make_request(f"left-{number}", PROMPT, 3))
            tokens = asyncio.ensure_future(left.tokens())
            await until(
                lambda: tokens.done() or rig.decode.extra_counters()["kv_bytes_received_total"] - before >= half  # noqa: B023
            )
            num_late += not tokens.done()
            tokens.cancel()
            await asyncio.gather(tokens, return_exceptions=True)
            while (failure := await failure_of(rig, make_request(f"next-{number}", PROMPT, 3))) is not None:
                assert isinstance(failure, Overloaded | TransferError), failure
                await asyncio.sleep(0.002)
        await rig.wait_idle()
    assert num_late > num_loops / 2
