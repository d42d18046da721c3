"""Peers that die, fall silent, are greedy or talk garbage, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
from rpc_peers import (
    DECODE,
    QUICK,
    SECRET,
    Count,
    Echo,
    Hang,
    connect_blocking,
    encode_raw,
    no_leaks,
)
from waiting import until

from pd_core.errors import (
    ProtocolError,
    WorkerLost,
)
from pd_rpc.auth import CONTROL_KIND
from pd_rpc.blocking import authenticate_blocking_as_server
from pd_rpc.frames import encode_frame
from pd_rpc.limits import RpcLimits
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
async def process_server():
    """A server in its own process: (process, address)."""
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent)))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER_PROGRAM, stdout=asyncio.subprocess.PIPE, env=env
    )
    host, port = (await process.stdout.readline()).decode().split()
    yield process, (host, int(port))
    if process.returncode is None:
        process.kill()
    await process.wait()


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
