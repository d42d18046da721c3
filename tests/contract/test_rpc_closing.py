"""Ends of servers and clients, also with peers that do not read, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from rpc_peers import (
    REPLIES,
    ROUTER,
    SECRET,
    Count,
    Echo,
    Hang,
    connect_blocking,
    encode_raw,
)
from waiting import until

from pd_core.errors import (
    Unavailable,
    WorkerLost,
)
from pd_rpc.client import RpcClient
from pd_rpc.frames import encode_frame
from pd_rpc.limits import RpcLimits
from pd_rpc.wire import Call, encode


async def test_closing_a_server_ends_everything_and_tells_the_callers(peers, handlers):
    server, address = await peers.server(handlers)
    clients = [await peers.client(address) for _ in range(3)]
    calls = [asyncio.create_task(client.call(Hang(), deadline_s=30.0)) for client in clients for _ in range(5)]
    await until(lambda: server.num_calls == 15)
    began_s = time.monotonic()
    await server.close()
    assert time.monotonic() - began_s < 1.0
    assert (server.num_calls, server.num_connections, len(handlers.ended_at_s)) == (0, 0, 15)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, WorkerLost)
        assert "decode 'decode-0' is shutting down" in result.message
    for client in clients:
        assert isinstance(await client.wait_closed(), WorkerLost)
    with pytest.raises(Unavailable, match="cannot connect"):
        await peers.client(address)
    await server.close()


async def test_a_handler_that_does_not_end_is_named_and_does_not_hold_up_the_close(peers, handlers, caplog):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    call = asyncio.create_task(client.call(Hang(stubborn_s=0.5), deadline_s=30.0))
    await until(lambda: server.num_calls == 1)
    began_s = time.monotonic()
    await server.close(grace_s=0.1)
    assert time.monotonic() - began_s < 0.4
    assert "decode-0:Hang:1 does not end" in caplog.text
    with pytest.raises(WorkerLost):
        await call
    await until(lambda: handlers.ended_at_s)


async def test_a_peer_that_does_not_read_does_not_hold_up_the_close(peers, handlers):
    server, address = await peers.server(handlers, limits=RpcLimits(linger_s=0.2))
    with await connect_blocking(address) as sock:
        sock.sendall(encode_frame(encode(Call(1, 30.0, 1000, encode_raw(Count(1000, item_bytes=1_000_000))))))
        await until(lambda: handlers.num_made >= 2)
        began_s = time.monotonic()
        await server.close()
        assert time.monotonic() - began_s < 1.0
    assert handlers.ended_at_s


async def test_half_a_close_by_a_peer_that_does_not_read_ends_its_handlers_at_once(peers, handlers):
    server, address = await peers.server(handlers, limits=RpcLimits(linger_s=0.2))
    with await connect_blocking(address) as sock:
        sock.sendall(encode_frame(encode(Call(1, 30.0, 1000, encode_raw(Count(1000, item_bytes=1_000_000))))))
        await until(lambda: handlers.num_made >= 2)
        sock.shutdown(socket.SHUT_WR)
        await until(lambda: handlers.ended_at_s, within_s=0.5)
        await until(lambda: server.num_connections == 0, within_s=1.0)


async def test_closing_a_client_is_not_an_error(peers, handlers):
    server, address = await peers.server(handlers)
    async with await RpcClient.connect(*address, identity=ROUTER, secret=SECRET, replies=REPLIES) as client:
        await client.call(Echo("x"), deadline_s=2.0)
    assert await client.wait_closed() is None
    with pytest.raises(WorkerLost):
        await client.call(Echo("x"), deadline_s=2.0)
    await client.close()
    await until(lambda: server.num_connections == 0)
