"""A host's link breaks, with and without a signal, at every moment of a handoff, for good or for a while."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from host_network import HostNetwork, Link
from host_paths import NO_UCX, over_every_network_path
from host_workers import CLEAN_S, HostRig, HostRun, host_config, until_idle, until_so, workers_on
from worker_rig import connect, make_request, outcome_of

from pd_core.errors import KvrelayError, LeaseExpired, WorkerLost

PROMPT_TOKENS = 20 * 32 - 40
"""Nineteen chunks."""
STEP_S = 0.06
BACK_S = 10.0
"""A connection that has been silent for so long is given up and made anew."""

LinkChange = Callable[[Link], None]
WITHOUT_SIGNAL = (Link.unplug, Link.plug_in)
SILENT = (Link.swallow, Link.deliver)
broken = pytest.mark.parametrize(
    ("path", "harm", "mend"),
    [
        pytest.param("tcp", *WITHOUT_SIGNAL, id="tcp-no-signal"),
        pytest.param("tcp", *SILENT, id="tcp-silent"),
        pytest.param("ucx", *SILENT, id="ucx-silent", marks=NO_UCX),
    ],
)


async def until_blocks_arrived(rig: HostRig, num_blocks: int) -> None:
    """Until the decode worker has so many blocks of a handoff that goes on."""
    num_bytes = num_blocks * 256

    async def have_come() -> bool:
        return (await rig.status(rig.to_decode)).counters["kv_bytes_received_total"] >= num_bytes

    await until_so(have_come, 5.0)


async def begin(rig: HostRig, name: str, num_blocks: int) -> tuple[HostRun, asyncio.Future[KvrelayError | None]]:
    """A request of which so many blocks have arrived, and what is to become of it."""
    run = rig.run(make_request(name, PROMPT_TOKENS, 5))
    outcome = asyncio.ensure_future(outcome_of(run))
    await until_blocks_arrived(rig, num_blocks)
    assert run.committed is None
    return run, outcome


async def until_served(rig: HostRig, name: str) -> None:
    """Requests are tried until one is served; those before fail openly, and none is ever wrong."""
    await rig.reconnect()
    began_s = time.monotonic()
    while (error := await outcome_of(rig.run(make_request(name, 50, 3)))) is not None:
        assert time.monotonic() - began_s < BACK_S, error
        await asyncio.sleep(0.1)


@broken
async def test_a_writer_that_is_cut_off_before_it_begins_costs_the_request_and_no_block(
    network: HostNetwork, tmp_path: Path, path: str, harm: LinkChange, mend: LinkChange
) -> None:
    async with workers_on(network, tmp_path, host_config(path=path)) as rig:
        harm(network.links["prefill"])
        began_s = time.monotonic()
        error = await outcome_of(rig.run(make_request("r1", PROMPT_TOKENS, 5)))
        assert isinstance(error, LeaseExpired)
        assert time.monotonic() - began_s < CLEAN_S
        await until_idle(rig.to_decode, began_s + CLEAN_S - time.monotonic())
        mend(network.links["prefill"])
        await until_served(rig, "r2")


@broken
async def test_a_writer_that_is_cut_off_half_way_costs_the_request_and_no_block(
    network: HostNetwork, tmp_path: Path, path: str, harm: LinkChange, mend: LinkChange
) -> None:
    async with workers_on(network, tmp_path, host_config(path=path, step_s=STEP_S)) as rig:
        _, outcome = await begin(rig, "r1", 6)
        harm(network.links["prefill"])
        began_s = time.monotonic()
        assert isinstance(await outcome, LeaseExpired)
        assert time.monotonic() - began_s < CLEAN_S
        await until_idle(rig.to_decode, began_s + CLEAN_S - time.monotonic())
        mend(network.links["prefill"])
        await until_served(rig, "r2")


@broken
async def test_a_link_that_is_back_within_the_lease_costs_nothing_but_time(
    network: HostNetwork, tmp_path: Path, path: str, harm: LinkChange, mend: LinkChange
) -> None:
    async with workers_on(network, tmp_path, host_config(path=path, step_s=STEP_S, lease_s=4.0)) as rig:
        run, outcome = await begin(rig, "r1", 6)
        harm(network.links["prefill"])
        await asyncio.sleep(0.5)
        mend(network.links["prefill"])
        assert await outcome is None
        assert run.committed is not None
        assert run.committed.path == path


@broken
async def test_when_decode_is_cut_off_both_sides_free_their_blocks_within_the_lease_and_two_seconds(
    network: HostNetwork, tmp_path: Path, path: str, harm: LinkChange, mend: LinkChange
) -> None:
    async with workers_on(network, tmp_path, host_config(path=path, step_s=STEP_S)) as rig:
        _, outcome = await begin(rig, "r1", 6)
        harm(network.links["decode"])
        began_s = time.monotonic()
        error = await outcome
        assert isinstance(error, WorkerLost)
        assert re.search(r"decode 'decode-0' at \S+ did not answer the prefill worker for 1\.5 s", error.message)
        await until_idle(rig.to_prefill, began_s + CLEAN_S - time.monotonic())
        await asyncio.sleep(began_s + CLEAN_S - time.monotonic())
        mend(network.links["decode"])
        async with await connect(rig.decode_end) as fresh:
            await until_idle(fresh, 0.3)
        await until_served(rig, "r2")


@broken
async def test_once_the_handoff_is_committed_prefill_is_not_needed_any_more(
    network: HostNetwork, tmp_path: Path, path: str, harm: LinkChange, mend: LinkChange
) -> None:
    async with workers_on(network, tmp_path, host_config(path=path, step_s=0.02)) as rig:
        run = rig.run(make_request("r1", 50, 60))
        outcome = asyncio.ensure_future(outcome_of(run))

        async def is_committed() -> bool:
            return run.committed is not None

        await until_so(is_committed, 5.0)
        harm(network.links["prefill"])
        assert len(run.made) < 50
        assert await outcome is None
        mend(network.links["prefill"])


@over_every_network_path
async def test_a_prefill_host_that_loses_power_half_way_costs_the_request_and_no_block(
    network: HostNetwork, tmp_path: Path, path: str
) -> None:
    async with workers_on(network, tmp_path, host_config(path=path, step_s=STEP_S), hosts=("spare", "decode")) as rig:
        _, outcome = await begin(rig, "r1", 6)
        network.links["spare"].swallow()  # nobody hears its sockets being closed
        rig.prefill.signal(signal.SIGKILL)
        began_s = time.monotonic()
        assert isinstance(await outcome, LeaseExpired)
        assert time.monotonic() - began_s < CLEAN_S
        await until_idle(rig.to_decode, began_s + CLEAN_S - time.monotonic())
