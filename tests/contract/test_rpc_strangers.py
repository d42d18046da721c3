"""Peers that are mute, foreign or too many, before they have proved themselves, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import pytest
from rpc_peers import (
    DECODE,
    QUICK,
    Echo,
)
from waiting import until

from pd_core.errors import (
    AuthenticationFailed,
    LayoutMismatch,
    Overloaded,
    Unavailable,
)
from pd_rpc.frames import encode_frame
from pd_rpc.limits import RpcLimits
from pd_rpc.server import _bind


async def test_ipv6_works_and_its_addresses_are_bracketed(peers, handlers):
    _, address = await peers.server(handlers, host="::1")
    assert address[0] == "::1"
    client = await peers.client(address)
    assert await client.call(Echo("six"), deadline_s=2.0) == Echo("six")
    with pytest.raises(AuthenticationFailed, match=rf"\[::1\]:{address[1]}: "):
        await peers.client(address, secret=b"the secret of another cluster")


async def test_a_server_listens_on_the_one_address_that_it_was_given(peers, handlers):
    _, (_, port) = await peers.server(handlers, host="127.0.0.1")
    for elsewhere in ("::1", "127.0.0.2"):
        with pytest.raises(Unavailable, match="cannot connect"):
            await peers.client((elsewhere, port))
    with pytest.raises(ValueError, match="address"):
        await peers.server(handlers, host="")


async def test_all_ipv6_addresses_are_not_the_ipv4_ones_too():
    with await _bind("::", 0) as sock:
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


async def test_a_name_and_a_nameless_port_will_do(peers, handlers):
    _, (_, port) = await peers.server(handlers, host="localhost")
    client = await peers.client(("localhost", port))
    assert client.peer == DECODE


async def test_a_mute_peer_is_an_error_naming_it_within_the_deadline(peers, listener):
    host, port = listener.getsockname()
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port}: no handshake within 0.2 s"):
        await peers.client((host, port), deadline_s=0.2)
    assert time.monotonic() - began_s < 1.0


async def test_nobody_there_is_an_error_naming_the_address(peers, listener):
    host, port = listener.getsockname()
    listener.close()
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port}: cannot connect"):
        await peers.client((host, port))


async def test_connecting_can_be_cancelled(peers, listener):
    task = asyncio.create_task(peers.client(listener.getsockname()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_mute_client_is_cut_off_at_the_handshake_deadline(peers, handlers):
    _, address = await peers.server(handlers, limits=QUICK)
    reader, writer = await asyncio.open_connection(*address)
    began_s = time.monotonic()
    assert b"no handshake within 0.4 s" in await asyncio.wait_for(reader.read(), 5.0)
    assert 0.3 < time.monotonic() - began_s < 2.0
    writer.close()


async def test_a_wrong_secret_is_refused_on_both_sides(peers, handlers, caplog):
    server, address = await peers.server(handlers)
    with caplog.at_level(logging.WARNING), pytest.raises(AuthenticationFailed, match=f"127.0.0.1:{address[1]}: "):
        await peers.client(address, secret=b"the secret of another cluster")
    assert server.num_connections == 0
    assert "router 'router-0' does not know this cluster's secret" in caplog.text


@pytest.mark.parametrize("where", ["client", "server"])
async def test_a_refused_peer_hears_why(peers, handlers, where):
    def refuse(ours, theirs):
        raise LayoutMismatch(f"{ours.name} has bf16, {theirs.name} has fp32")

    server, address = await peers.server(handlers, **({"check_peer": refuse} if where == "server" else {}))
    first, second = ("decode-0", "router-0") if where == "server" else ("router-0", "decode-0")
    with pytest.raises(LayoutMismatch, match=f"{first} has bf16, {second} has fp32"):
        await peers.client(address, **({"check_peer": refuse} if where == "client" else {}))
    await until(lambda: server.num_connections == 0)


async def test_a_check_that_itself_fails_refuses_without_details(peers, handlers, caplog):
    def broken(ours, theirs):
        raise ZeroDivisionError("the password is 1234")

    _, address = await peers.server(handlers, check_peer=broken)
    with pytest.raises(Exception, match="the check of the peer failed") as raised:
        await peers.client(address)
    assert "1234" not in str(raised.value)
    assert "the password is 1234" in caplog.text


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, encode_frame(b"\xc1")],
    ids=["http", "zeros", "no msgpack"],
)
async def test_another_protocol_is_closed_with_a_logged_reason_and_hurts_nobody(peers, handlers, caplog, data):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    await asyncio.wait_for(reader.read(), 5.0)
    writer.close()
    assert "an unknown peer at 127.0.0.1" in caplog.text
    assert await client.call(Echo("alive"), deadline_s=2.0) == Echo("alive")


async def test_mute_connections_beyond_the_bound_are_told_off_and_later_peers_get_in(peers, handlers):
    server, address = await peers.server(handlers, limits=RpcLimits(max_unauthenticated=2, linger_s=0.2))
    mute = [await asyncio.open_connection(*address) for _ in range(2)]
    with pytest.raises(Overloaded, match="in their handshake"):
        await peers.client(address)
    for _, writer in mute:
        writer.close()
    await until(lambda: not server._connections)
    assert (await peers.client(address)).peer == DECODE


async def test_even_telling_off_is_bounded(peers, handlers):
    server, address = await peers.server(handlers, limits=RpcLimits(max_unauthenticated=2, linger_s=30.0))
    mute = [await asyncio.open_connection(*address) for _ in range(4)]
    with pytest.raises(Unavailable):
        await peers.client(address)
    assert len(server._connections) == 4
    for _, writer in mute:
        writer.close()


async def test_peers_beyond_the_bound_are_refused(peers, handlers):
    server, address = await peers.server(handlers, limits=RpcLimits(max_connections=2))
    first = await peers.client(address)
    await peers.client(address)
    with pytest.raises(Overloaded, match="2 peers are connected"):
        await peers.client(address)
    await first.close()
    await until(lambda: server.num_connections == 1)
    await peers.client(address)


async def test_sockets_do_not_wait_to_fill_packets(peers, handlers):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    (served,) = server._connections
    for link in (client._link, served.link):
        sock = link._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
