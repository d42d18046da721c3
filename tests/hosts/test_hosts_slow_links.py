"""Links that are slow, lossy or narrow: handoffs take longer there, and are as right as anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from host_network import HostNetwork, why_no_netem
from host_paths import over_every_network_path
from host_workers import host_config, until_idle, workers_on
from worker_rig import check_stream, make_request, outcome_of

from pd_core.errors import DeadlineExceeded, TransferError

PROMPT_TOKENS = 20 * 32 - 40
HEAD_BYTES = 1024
"""Blocks of 32 KiB."""
BLOCK_BYTES = 2 * 16 * HEAD_BYTES
NUM_BLOCKS = 38
DELAY_S = 0.025
"""In one direction: 50 ms there and back."""
LOSSY_HEAD_BYTES = 256
"""Blocks of 8 KiB: with a packet in twenty lost, one connection gets some 150 kB/s across."""


@over_every_network_path
@pytest.mark.parametrize("means", ["netem", "wire"])
@pytest.mark.parametrize("loss", [0.01, 0.05])
async def test_over_a_link_that_delays_and_loses_packets_a_handoff_is_slower_and_right(
    network: HostNetwork, tmp_path: Path, path: str, means: str, loss: float
) -> None:
    """Both directions of the link are late, and the blocks, 311 kB, are more than is under way at once."""
    if means == "netem" and (reason := why_no_netem()) is not None:
        pytest.skip(reason)
    async with workers_on(
        network, tmp_path, host_config(path=path, lease_s=3.0, push_s=10.0), head_bytes=LOSSY_HEAD_BYTES
    ) as rig:
        quick = rig.run(make_request("r1", PROMPT_TOKENS, 3))
        await quick.tokens()
        if means == "netem":
            network.links["prefill"].slow_by_netem(DELAY_S, loss)
        else:
            network.links["prefill"].slow_by_wire(DELAY_S, loss, tmp_path / "wire.log")
        late = rig.run(make_request("r2", PROMPT_TOKENS, 3))
        await late.tokens()
        for run in (quick, late):
            check_stream(run)
            assert run.committed is not None
            assert (run.committed.path, run.committed.num_bytes) == (path, NUM_BLOCKS * 2 * 16 * LOSSY_HEAD_BYTES)
        assert late.committed is not None
        assert late.committed.wait_s > 3 * DELAY_S  # ticket to prefill, blocks back: they cross the link three times


@over_every_network_path
async def test_a_wire_slower_than_prefill_takes_longer_than_the_lease_which_renewals_hold(
    network: HostNetwork, tmp_path: Path, path: str
) -> None:
    async with workers_on(
        network, tmp_path, host_config(path=path, lease_s=1.0, push_s=10.0), head_bytes=HEAD_BYTES
    ) as rig:
        network.links["decode"].narrow(400_000)
        run = rig.run(make_request("r1", PROMPT_TOKENS, 3))
        await run.tokens()
        check_stream(run)
        assert run.committed is not None
        assert run.committed.wait_s > NUM_BLOCKS * BLOCK_BYTES / 400_000 - 0.2 > 2.0
        network.links["decode"].widen()


@over_every_network_path
async def test_many_chunks_on_a_wire_slower_than_prefill_take_many_push_timeouts_and_arrive(
    network: HostNetwork, tmp_path: Path, path: str
) -> None:
    """Nineteen pushes wait for each other, four seconds in all; each has a fifth of a second on the wire."""
    async with workers_on(
        network, tmp_path, host_config(path=path, lease_s=3.0, push_s=1.5), head_bytes=HEAD_BYTES
    ) as rig:
        network.links["decode"].narrow(300_000)
        run = rig.run(make_request("r1", PROMPT_TOKENS, 3))
        await run.tokens()
        check_stream(run)
        assert run.committed is not None
        assert run.committed.wait_s > NUM_BLOCKS * BLOCK_BYTES / 300_000 - 0.2 > 3.0
        assert run.committed.num_bytes == NUM_BLOCKS * BLOCK_BYTES  # nothing came twice
        assert await rig.path_to_decode() == path  # no failure is held against it
        network.links["decode"].widen()


@over_every_network_path
async def test_a_wire_on_which_a_block_takes_longer_than_a_push_may_costs_the_request_and_no_block(
    network: HostNetwork, tmp_path: Path, path: str
) -> None:
    async with workers_on(
        network, tmp_path, host_config(path=path, lease_s=3.0, push_s=0.2), head_bytes=HEAD_BYTES
    ) as rig:
        network.links["decode"].narrow(60_000)
        error = await outcome_of(rig.run(make_request("r1", PROMPT_TOKENS, 3)))
        assert isinstance(error, DeadlineExceeded | TransferError)  # no verdict in time, or too many pushes given up
        network.links["decode"].widen()
        await asyncio.gather(until_idle(rig.to_prefill), until_idle(rig.to_decode))


@over_every_network_path
async def test_streams_of_one_link_do_not_starve_each_other(network: HostNetwork, tmp_path: Path, path: str) -> None:
    async with workers_on(
        network, tmp_path, host_config(path=path, lease_s=3.0, push_s=10.0), head_bytes=HEAD_BYTES
    ) as rig:
        network.links["prefill"].narrow(1_000_000)
        runs = [rig.run(make_request(f"r{number}", 100 + number, 4)) for number in range(4)]
        await asyncio.gather(*(run.tokens() for run in runs))
        for run in runs:
            check_stream(run)
        network.links["prefill"].widen()
