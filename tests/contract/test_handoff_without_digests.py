"""Handoffs under `transfer.digests: false`: no side makes a digest, and what breaks is found all the same."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from worker_rig import HANDOFF_PATHS, Times, check_stream, failure_of, make_request, small_config, workers

from kv_transport.inproc_faults import FaultPlan
from pd_core.config import Config
from pd_core.errors import TransferError

PROMPT = 101


def config(*, digests: bool) -> Config:
    built = small_config()
    return msgspec.structs.replace(built, transfer=msgspec.structs.replace(built.transfer, digests=digests))


def forbid_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_digest(_: memoryview) -> int:
        raise AssertionError("nobody asked for digests")

    for module in ("pd_worker.outgoing_path", "kv_transport.digest", "kv_transport.reception"):
        monkeypatch.setattr(f"{module}.block_digest", no_digest)


@pytest.mark.parametrize("path", HANDOFF_PATHS)
async def test_tokens_are_right_and_no_digest_is_made(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_digests(monkeypatch)
    async with workers(path, config(digests=False)) as rig:
        runs = [rig.run(make_request(f"r{number}", PROMPT, 5)) for number in range(4)]
        await asyncio.gather(*(run.tokens() for run in runs))
        for run in runs:
            check_stream(run)
            assert run.ticket is not None
            assert not run.ticket.with_digests


@pytest.mark.parametrize("path", HANDOFF_PATHS)
async def test_the_worker_that_receives_decides(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers with different settings: the prefill worker goes by the ticket."""
    async with workers(path, config(digests=True)) as rig:
        assert await failure_of(rig, make_request("with", PROMPT, 5)) is None
        rig.decode._handoffs._with_digests = False
        forbid_digests(monkeypatch)
        assert await failure_of(rig, make_request("without", PROMPT, 5)) is None


async def test_frames_that_are_cut_short_or_come_late_or_twice_are_found_without_digests() -> None:
    num_right = 0
    for seed in range(4):
        generator = random.Random(seed)
        kinds = {"delay": 0.2, "cut": 0.1, "duplicate": 0.2, "reorder": 0.1, "truncate": 0.1}
        faults = FaultPlan(generator, **kinds, delay_s=0.02)
        async with workers("inproc", config(digests=False), faults=faults, times=Times(0.001, 0.001)) as rig:
            requests = [make_request(f"s{seed}-{n}", generator.randrange(1, 130), 4) for n in range(8)]
            failures = await asyncio.gather(*(failure_of(rig, request) for request in requests))
            assert all(failure is None or isinstance(failure, TransferError) for failure in failures), failures
            num_right += failures.count(None)
    assert num_right > 24
