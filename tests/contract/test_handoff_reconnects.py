"""Connections for KV that cannot be made: one that was cut costs a moment, one that nobody takes the request."""

from __future__ import annotations

import time

import pytest
from worker_rig import check_stream, make_request, workers

from kv_transport.tcp_receiver import TcpListener
from pd_core.errors import KvrelayError
from pd_rpc.address import format_address


def cut_while_made(monkeypatch: pytest.MonkeyPatch, num_times: int) -> list[int]:
    """So many connections are reset in the middle of their handshake; one entry for each that was begun."""
    prove, begun = TcpListener._prove_on, []

    def cut_at_first(self, stream):
        begun.append(1)
        if len(begun) <= num_times:
            raise ConnectionResetError("cut")
        return prove(self, stream)

    monkeypatch.setattr(TcpListener, "_prove_on", cut_at_first)
    return begun


@pytest.mark.parametrize("num_times", [1, 2])
async def test_a_connection_that_is_cut_while_it_is_made_costs_no_request(monkeypatch, num_times):
    begun = cut_while_made(monkeypatch, num_times)
    async with workers("tcp") as rig:
        run = rig.run(make_request("r1", 64, 5))
        await run.tokens()
        check_stream(run)
    assert len(begun) > num_times


async def test_a_pool_that_cuts_every_connection_ends_the_request_within_three_seconds_and_is_named(monkeypatch):
    cut_while_made(monkeypatch, 1_000)
    async with workers("tcp") as rig:
        [address] = rig.decode._receiver.addresses
        began_s = time.monotonic()
        with pytest.raises(KvrelayError) as failure:
            await rig.run(make_request("r1", 64, 5)).tokens()
        assert time.monotonic() - began_s < 3.0
        assert format_address(address.host, address.port) in failure.value.message
        await rig.wait_idle()
