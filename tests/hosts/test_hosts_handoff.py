"""Handoffs between workers of several hosts: the right bits over the right path."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from host_network import HostNetwork
from host_paths import over_every_network_path
from host_workers import host_config, workers_on
from worker_rig import check_stream, make_request

PROMPT_TOKENS = 3 * 32 + 5
NUM_BLOCKS = 7


async def test_across_hosts_kv_goes_over_tcp_and_the_worker_says_why_not_through_memory(
    network: HostNetwork, tmp_path: Path
) -> None:
    async with workers_on(network, tmp_path, host_config(path="auto", step_s=0.02)) as rig:
        run = rig.run(make_request("r1", PROMPT_TOKENS, 5))
        await run.tokens()
        check_stream(run)
        assert run.committed is not None
        assert (run.committed.path, run.committed.num_blocks) == ("tcp", NUM_BLOCKS)
        said = await rig.path_to_decode()
        assert said.startswith("tcp (shm failed, 1 in a row: @kvrelay-")
        assert "nobody listens: on another host, or gone" in said


@over_every_network_path
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
async def test_a_path_that_the_config_names_carries_all_blocks_across_hosts(
    network: HostNetwork, tmp_path: Path, path: str, family: str
) -> None:
    addresses = {host: getattr(network, family)(host) for host in ("prefill", "decode")}
    async with workers_on(
        network, tmp_path, host_config(path=path, step_s=0.02), addresses=(addresses["prefill"], addresses["decode"])
    ) as rig:
        runs = [rig.run(make_request(f"r{number}", PROMPT_TOKENS, 5)) for number in range(3)]
        await asyncio.gather(*(run.tokens() for run in runs))
        for run in runs:
            check_stream(run)
            assert run.ticket is not None
            assert run.committed is not None
            assert {(address.path, address.host) for address in run.ticket.addresses} == {(path, addresses["decode"])}
            assert (run.committed.path, run.committed.num_blocks) == (path, NUM_BLOCKS)
        assert await rig.path_to_decode() == path


async def test_on_one_host_kv_goes_through_its_memory(network: HostNetwork, tmp_path: Path) -> None:
    async with workers_on(network, tmp_path, host_config(path="auto"), hosts=("decode", "decode")) as rig:
        run = rig.run(make_request("r1", PROMPT_TOKENS, 5))
        await run.tokens()
        check_stream(run)
        assert run.committed is not None
        assert run.committed.path == "shm"
        assert await rig.path_to_decode() == "shm"
