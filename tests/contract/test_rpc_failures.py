"""Peers that are mute, foreign, dying, silent or greedy, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rpc_peers import (
    DECODE,
    QUICK,
    REPLIES,
    ROUTER,
    SECRET,
    Count,
    Echo,
    Handlers,
    Hang,
    no_leaks,
    until,
)

from pd_core.errors import (
    AuthenticationFailed,
    LayoutMismatch,
    Overloaded,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from pd_rpc.auth import CONTROL_KIND
from pd_rpc.blocking import authenticate_blocking_as_client, authenticate_blocking_as_server
from pd_rpc.client import RpcClient
from pd_rpc.frames import encode_frame
from pd_rpc.limits import RpcLimits
from pd_rpc.server import _bind
from pd_rpc.wire import Call, Cancel, Credit, encode

SERVER_PROGRAM = """
import asyncio
from rpc_peers import DECODE, SECRET, Handlers
from pd_rpc.server import RpcServer

async def main():
    server = RpcServer(DECODE, SECRET, Handlers().table())
    print(*await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
async def peers():
    async with no_leaks() as peers:
        yield peers


@pytest.fixture
def handlers():
    return Handlers()


@pytest.fixture
async def process_server():
    """A server in its own process: (process, address)."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER_PROGRAM, stdout=asyncio.subprocess.PIPE, env=env
    )
    host, port = (await process.stdout.readline()).decode().split()
    yield process, (host, int(port))
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


async def connect_blocking(address) -> socket.socket:
    """A client that has authenticated and now does what the test likes."""

    def connect():
        sock = socket.create_connection(address)
        authenticate_blocking_as_client(sock, SECRET, ROUTER, kind=CONTROL_KIND, deadline_s=5.0)
        return sock

    return await asyncio.to_thread(connect)


# getting to know each other


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


# dying


async def test_a_killed_server_fails_every_open_call_at_once(peers, process_server):
    process, address = process_server
    client = await peers.client(address)
    stream = client.stream(Count(10**6, pause_s=0.001), deadline_s=30.0)
    await anext(stream)
    calls = [asyncio.create_task(client.call(Hang(), deadline_s=30.0)) for _ in range(20)]
    await asyncio.sleep(0.05)
    began_s = time.monotonic()
    process.kill()
    results = await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(WorkerLost, match=f"decode 'decode-0' at 127.0.0.1:{address[1]}"):
        [item async for item in stream]
    assert time.monotonic() - began_s < 1.0
    assert {type(result) for result in results} == {WorkerLost}
    assert isinstance(await client.wait_closed(), WorkerLost)
    with pytest.raises(WorkerLost, match="decode-0"):
        await client.call(Echo("anybody?"), deadline_s=1.0)


async def test_a_stopped_server_is_suspect_and_then_lost(peers, process_server):
    process, address = process_server
    client = await peers.client(address, limits=QUICK)
    call = asyncio.create_task(client.call(Hang(), deadline_s=30.0))
    await asyncio.sleep(0.2)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: client.silent_s > 0.2)
    assert not client.is_closed
    error = await asyncio.wait_for(client.wait_closed(), 3.0)
    process.send_signal(signal.SIGCONT)
    assert isinstance(error, WorkerLost)
    assert "was silent for 0.4 s" in error.message
    with pytest.raises(WorkerLost, match="was silent"):
        await call


async def test_idle_peers_hear_from_each_other(peers, handlers):
    _, address = await peers.server(handlers, limits=QUICK)
    client = await peers.client(address, limits=QUICK)
    most_silent_s = 0.0
    for _ in range(100):
        await asyncio.sleep(0.01)
        most_silent_s = max(most_silent_s, client.silent_s)
    assert not client.is_closed  # for 2.5 times silent_dead_s
    assert most_silent_s < 0.3


async def test_a_client_that_falls_silent_loses_its_calls(peers, handlers):
    server, address = await peers.server(handlers, limits=QUICK)
    sock = await connect_blocking(address)
    with sock:
        sock.sendall(encode_frame(encode(Call(1, 30.0, 1, encode_raw(Hang())))))
        await until(lambda: server.num_calls == 1)
        await until(lambda: server.num_calls == server.num_connections == 0)
    assert handlers.ended_at_s


async def test_a_reset_connection_ends_its_handlers(peers, handlers):
    server, address = await peers.server(handlers)
    sock = await connect_blocking(address)
    sock.sendall(encode_frame(encode(Call(1, 30.0, 1, encode_raw(Hang())))))
    await until(lambda: server.num_calls == 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    await until(lambda: server.num_calls == server.num_connections == 0, within_s=1.0)


async def test_a_handler_is_stopped_at_the_deadline_even_if_nobody_cancels_it(peers, handlers):
    _, address = await peers.server(handlers)
    with await connect_blocking(address) as sock:
        sock.sendall(encode_frame(encode(Call(1, 0.1, 1, encode_raw(Hang())))))
        await until(lambda: handlers.ended_at_s, within_s=1.0)
        data = await asyncio.to_thread(sock.recv, 1000)
    assert b"DeadlineExceeded" in data


async def test_a_call_cancelled_in_the_same_breath_is_still_finished(peers, handlers):
    server, address = await peers.server(handlers)
    with await connect_blocking(address) as sock:
        call, cancel = Call(1, 30.0, 1, encode_raw(Hang())), Cancel(1)
        unknown, credit = Call(2, 30.0, 1, encode_raw({"type": "unknown"})), Credit(2, 1)
        sock.sendall(b"".join(encode_frame(encode(message)) for message in (call, cancel, unknown, credit)))
        data = b""
        while data.count(b"failed") < 2:
            data += await asyncio.to_thread(sock.recv, 1000)
        assert b"Cancelled" in data
        assert b"ProtocolError" in data
        assert (server.num_calls, server.num_connections) == (0, 1)


@pytest.mark.parametrize("body", [Hang(), {"type": "unknown"}])
async def test_a_call_with_garbage_right_behind_it_is_not_begun(peers, handlers, body):
    server, address = await peers.server(handlers)
    with await connect_blocking(address) as sock:
        await until(lambda: server.num_connections == 1)
        sock.sendall(encode_frame(encode(Call(1, 30.0, 1, encode_raw(body)))) + b"garbage that is no frame")
        await until(lambda: server.num_connections == 0)
    assert (server.num_calls, handlers.ended_at_s) == (0, [])


async def test_garbage_from_an_authenticated_peer_closes_its_connection(peers, handlers, caplog):
    server, address = await peers.server(handlers)
    with await connect_blocking(address) as sock:
        sock.sendall(b"garbage that is no frame")
        await until(lambda: "begins with b'garb'" in caplog.text)
        await until(lambda: server.num_connections == 0)


async def test_a_server_that_breaks_the_wire_format_is_closed_with_the_reason(listener):
    def serve():
        sock, _ = listener.accept()
        with sock:
            authenticate_blocking_as_server(sock, SECRET, DECODE, kind=CONTROL_KIND, deadline_s=5.0)
            sock.recv(1000)
            sock.sendall(b"garbage that is no frame")
            while sock.recv(1000):
                pass

    async with no_leaks() as peers:
        serving = asyncio.create_task(asyncio.to_thread(serve))
        client = await peers.client(listener.getsockname())
        with pytest.raises(WorkerLost, match="begins with b'garb'"):
            await client.call(Echo("x"), deadline_s=5.0)
        assert isinstance(await client.wait_closed(), ProtocolError)
        await serving


async def test_a_peer_that_asks_and_never_reads_is_given_up_before_it_fills_the_memory(peers, handlers, caplog):
    limits = RpcLimits(max_unsent_bytes=200_000, write_high_water_bytes=50_000, linger_s=0.2)
    server, address = await peers.server(handlers, limits=limits)
    sock = await connect_blocking(address)

    def flood():
        try:
            for call_id in range(1, 200_000):
                sock.sendall(encode_frame(encode(Call(call_id, 30.0, 1, encode_raw({"type": "unknown"})))))
        except OSError:
            return
        finally:
            sock.close()

    await asyncio.wait_for(asyncio.to_thread(flood), 20.0)
    assert "does not read" in caplog.text
    await until(lambda: server.num_connections == 0)


# closing


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


def encode_raw(body) -> msgspec.Raw:
    """A body as it stands inside a Call."""
    return msgspec.Raw(encode(body))
