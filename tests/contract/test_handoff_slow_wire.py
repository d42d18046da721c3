"""A wire slower than prefill: a handoff may take as long as it likes while its blocks arrive, and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from worker_rig import check_stream, make_request, outcome_of, small_config, workers

from decode_worker.handoff_calls import HandoffCalls
from pd_core.config import TransferConfig
from pd_core.errors import DeadlineExceeded, WorkerLost
from pd_core.messages import LeaseHeld, RenewLease
from pd_core.ticket import FirstToken
from pd_rpc.server import CallContext
from pd_worker.incoming import IncomingHandoff

PROMPT_TOKENS = 37 * 16 - 4
NUM_BLOCKS = 37
COPY_S = 0.03
PUSH_S = 0.3
"""A chunk is two blocks."""
CONFIG = small_config(transfer=TransferConfig(lease_s=0.6, push_timeout_s=PUSH_S))


def copy_slowly(source: memoryview, into: memoryview) -> None:
    time.sleep(COPY_S)
    into[:] = source


async def test_a_handoff_may_take_many_push_timeouts_as_long_as_each_push_keeps_its_own() -> None:
    async with workers("shm", CONFIG) as rig:
        receiver: Any = rig.decode._receiver
        receiver._listeners[0]._copy = copy_slowly
        began_s = time.monotonic()
        run = rig.run(make_request("slow", PROMPT_TOKENS, 3))
        await run.tokens()
        check_stream(run)
        assert time.monotonic() - began_s > NUM_BLOCKS * COPY_S > 3 * PUSH_S
        assert run.committed is not None
        assert (run.committed.path, run.committed.num_blocks) == ("shm", NUM_BLOCKS)
        status = await rig.status(rig.to_prefill)
        assert status.kv_paths["decode-0"] == "shm"  # no failure is held against it
        assert status.counters["kv_bytes_sent_total"] == run.committed.num_bytes  # nothing went twice


async def test_a_receiver_that_lives_and_says_nothing_of_blocks_or_a_verdict_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def finish(self: IncomingHandoff, first_token: FirstToken) -> list[int]:
        await asyncio.sleep(60.0)
        return []

    monkeypatch.setattr(IncomingHandoff, "finish", finish)
    async with workers("inproc", CONFIG) as rig:
        began_s = time.monotonic()
        error = await outcome_of(rig.run(make_request("mute", 50, 3)))
        assert isinstance(error, DeadlineExceeded)
        assert "decode 'decode-0': no block arrived for 0.3 s, and no verdict came" in error.message
        assert PUSH_S <= time.monotonic() - began_s < 3.0


async def test_a_verdict_is_waited_for_as_long_as_blocks_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    finish_now = IncomingHandoff.finish
    num_arrived = iter(range(1, 1000))

    async def finish(self: IncomingHandoff, first_token: FirstToken) -> list[int]:
        await asyncio.sleep(4 * PUSH_S)
        return await finish_now(self, first_token)

    monkeypatch.setattr(IncomingHandoff, "finish", finish)
    monkeypatch.setattr(IncomingHandoff, "num_arrived", property(lambda self: next(num_arrived)))
    async with workers("inproc", CONFIG) as rig:
        run = rig.run(make_request("late", 50, 3))
        await run.tokens()
        check_stream(run)
        assert run.committed is not None
        assert run.committed.wait_s >= 4 * PUSH_S


async def test_a_decode_worker_that_does_not_answer_is_lost_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def renew_and_say_nothing(self: HandoffCalls, body: RenewLease, _: CallContext) -> AsyncIterator[LeaseHeld]:
        while True:
            self._find(body.ref).renew()
            await asyncio.sleep(0.1)
        yield LeaseHeld()

    monkeypatch.setattr(HandoffCalls, "_renew_lease", renew_and_say_nothing)
    monkeypatch.setattr(IncomingHandoff, "finish", lambda self, first_token: asyncio.sleep(60.0))
    slow = small_config(transfer=TransferConfig(lease_s=0.6, push_timeout_s=10.0))
    async with workers("inproc", slow) as rig:
        error = await outcome_of(rig.run(make_request("cut", 50, 3)))
        assert isinstance(error, WorkerLost)
        said = f"decode 'decode-0' at {rig.decode_end.host}:{rig.decode_end.port} did not answer the prefill worker"
        assert f"{said} for 0.6 s" in error.message
