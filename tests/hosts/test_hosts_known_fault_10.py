"""Known fault 10: a handshake with a peer that is mute, or advertised where it is not, has no deadline.

Here every one has: its error names the host and port, comes within five seconds, and costs nobody else any time. IPv6
addresses, and names that have no other, work like any.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from host_network import HostNetwork
from host_paths import over_every_network_path
from host_serving import serving_on
from host_workers import HostRig, host_config, until_idle, workers_on
from worker_rig import check_stream, connect, make_request, outcome_of

from pd_core.errors import KvrelayError
from pd_core.messages import WorkerEndpoint
from pd_core.ticket import Ticket, TransportAddress
from pd_rpc.address import format_address

HANDSHAKE_S = 5.0
SLACK_S = 1.0
"""For a busy machine."""
PORT = 7000
NOBODY = "10.77.0.99"


@pytest.fixture
def mute(network: HostNetwork) -> Iterator[str]:
    """The address of a host where somebody accepts connections on PORT and stays silent."""
    with network.hosts["spare"].entered():
        listener = socket.create_server((network.ipv4("spare"), PORT))
    with listener:
        yield network.ipv4("spare")


Bend = Callable[[Ticket], Ticket]


def bend_kv(path: str, host: str) -> Bend:
    """The decode worker takes blocks at a wrong place."""
    return lambda ticket: msgspec.structs.replace(ticket, addresses=[TransportAddress(path, host, PORT)])


def bend_control(host: str) -> Bend:
    """The decode worker takes renewals and the end of the prefill at a wrong place."""
    return lambda ticket: msgspec.structs.replace(ticket, control_host=host, control_port=PORT)


async def check_it_fails_in_time_and_alone(rig: HostRig, bend: Bend, address: str) -> None:
    """A handoff with a bent ticket names the address that is wrong; another one is done before."""

    async def timed() -> tuple[KvrelayError | None, float]:
        began_s = time.monotonic()
        return await outcome_of(rig.run(make_request("bent", 50, 3), bend)), time.monotonic() - began_s

    bent = asyncio.ensure_future(timed())
    await asyncio.sleep(0.05)
    run = rig.run(make_request("right", 50, 3))
    await run.tokens()
    check_stream(run)
    refuses_at_once = address in ("127.0.0.1", "::1")
    assert refuses_at_once or not bent.done()
    error, took_s = await bent
    assert error is not None
    assert f"{format_address(address, PORT)}: " in error.message
    assert took_s < HANDSHAKE_S + SLACK_S
    await asyncio.gather(until_idle(rig.to_prefill), until_idle(rig.to_decode))


wrong_address = pytest.mark.parametrize("where", ["mute", "loopback", "nobody"])


def wrong(where: str, mute: str) -> str:
    return {"mute": mute, "loopback": "127.0.0.1", "nobody": NOBODY}[where]


@over_every_network_path
@wrong_address
async def test_a_handoff_whose_kv_goes_to_a_wrong_address_fails_in_time_names_it_and_delays_no_other(
    network: HostNetwork, tmp_path: Path, mute: str, where: str, path: str
) -> None:
    address = wrong(where, mute)
    async with workers_on(network, tmp_path, host_config(path=path, push_s=10.0)) as rig:
        await check_it_fails_in_time_and_alone(rig, bend_kv(path, address), address)


@wrong_address
async def test_a_handoff_whose_renewals_go_to_a_wrong_address_fails_in_time_names_it_and_delays_no_other(
    network: HostNetwork, tmp_path: Path, mute: str, where: str
) -> None:
    address = wrong(where, mute)
    async with workers_on(network, tmp_path) as rig:
        await check_it_fails_in_time_and_alone(rig, bend_control(address), address)


@wrong_address
async def test_a_router_says_within_the_deadline_which_worker_it_could_not_reach(
    network: HostNetwork, mute: str, where: str
) -> None:
    address = wrong(where, mute)
    end = WorkerEndpoint("prefill-0", "prefill", address, PORT, "boot", 1)
    with network.hosts["router"].entered():
        began_s = time.monotonic()
        with pytest.raises(KvrelayError, match=rf"^{address}:{PORT}: (no handshake within 5 s|cannot connect)"):
            await connect(end)
        assert time.monotonic() - began_s < HANDSHAKE_S + SLACK_S


async def test_the_router_uses_the_other_prefill_worker_at_once_when_one_is_mute_or_misadvertised(
    network: HostNetwork, tmp_path: Path, mute: str
) -> None:
    lost = [
        WorkerEndpoint("prefill-7", "prefill", mute, PORT, "boot", 1),
        WorkerEndpoint("prefill-8", "prefill", "127.0.0.1", PORT, "boot", 1),
        WorkerEndpoint("prefill-9", "prefill", NOBODY, PORT, "boot", 1),
    ]
    places = {"prefill-0": "prefill", "decode-0": "decode"}
    async with serving_on(network, tmp_path, host_config(), places, more=lost) as serving:
        replies = await asyncio.gather(*(serving.complete([number] * 40, 5) for number in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        assert max(reply.took_s for reply in replies) < HANDSHAKE_S  # nobody waited for one
        health = await serving.health()
        assert {health[worker.name] for worker in lost} == {"starting"}


async def test_a_prefill_host_that_falls_silent_is_left_out_and_the_other_serves(
    network: HostNetwork, tmp_path: Path
) -> None:
    places = {"prefill-0": "prefill", "prefill-1": "spare", "decode-0": "decode"}
    async with serving_on(network, tmp_path, host_config(), places) as serving:
        network.links["prefill"].swallow()
        statuses: list[int] = []
        ends_s = time.monotonic() + 5.0
        while time.monotonic() < ends_s and statuses[-4:] != [200] * 4:
            statuses.append((await serving.complete([len(statuses)] * 40, 5)).status)
        assert statuses[-4:] == [200] * 4, statuses
        assert set(statuses) <= {200, 503, 504}
        network.links["prefill"].deliver()


async def test_workers_and_router_speak_over_ipv6(network: HostNetwork, tmp_path: Path) -> None:
    places = {"prefill-0": "prefill", "decode-0": "decode"}
    async with serving_on(network, tmp_path, host_config(), places, address_of=network.ipv6, loopback="::1") as serving:
        assert serving.http.base_url.host == "::1"
        assert (await serving.complete([1, 2, 3] * 20, 5)).status == 200


async def test_a_wrong_ipv6_address_is_named_in_brackets(network: HostNetwork, tmp_path: Path) -> None:
    addresses = (network.ipv6("prefill"), network.ipv6("decode"))
    async with workers_on(network, tmp_path, host_config(push_s=10.0), addresses=addresses) as rig:
        for bend in (bend_kv("tcp", "::1"), bend_control("::1")):
            await check_it_fails_in_time_and_alone(rig, bend, "::1")


async def test_a_name_that_has_an_ipv6_address_alone_is_as_good_as_any(network: HostNetwork, tmp_path: Path) -> None:
    """Workers bind to such names, and get such names in tickets. Only hosts know them: we reach workers by number."""
    for host in ("prefill", "decode"):
        network.name_by_ipv6(f"{host}.six", host)

    def by_name(ticket: Ticket) -> Ticket:
        addresses = [
            msgspec.structs.replace(address, host="decode.six") for address in ticket.addresses if address.path != "shm"
        ]
        return msgspec.structs.replace(ticket, control_host="decode.six", addresses=addresses)

    async with workers_on(
        network,
        tmp_path,
        addresses=("prefill.six", "decode.six"),
        reached_at=(network.ipv6("prefill"), network.ipv6("decode")),
    ) as rig:
        for name, bend in (("as granted", lambda ticket: ticket), ("by name", by_name)):
            run = rig.run(make_request(name, 50, 3), bend)
            await run.tokens()
            check_stream(run)
            assert run.committed is not None
            assert run.committed.path == "tcp"
