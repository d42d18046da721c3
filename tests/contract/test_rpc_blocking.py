"""The handshake on blocking sockets, as data connections use it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rpc_peers import DECODE, ROUTER, SECRET, Handlers, no_leaks

from pd_core.errors import AuthenticationFailed, ConfigError, LayoutMismatch, ProtocolError, Unavailable
from pd_rpc.auth import CONTROL_KIND
from pd_rpc.blocking import authenticate_blocking_as_client, authenticate_blocking_as_server
from pd_rpc.frames import HEADER_BYTES, encode_frame

KIND = "test data"


@pytest.fixture
def sockets():
    """Two ends of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


def both(client_sock, server_sock, client_options=None, server_options=None):
    """Runs both sides; their results or errors."""
    defaults = {"kind": KIND, "deadline_s": 5.0, "secret": SECRET}
    client_options = {**defaults, "identity": ROUTER, **(client_options or {})}
    server_options = {**defaults, "identity": DECODE, **(server_options or {})}
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(authenticate_blocking_as_client, client_sock, **client_options),
            pool.submit(authenticate_blocking_as_server, server_sock, **server_options),
        ]
        return [future.exception() or future.result() for future in futures]


def test_both_sides_learn_who_the_other_is(sockets):
    sockets[0].settimeout(7.0)
    assert both(*sockets) == [DECODE, ROUTER]
    assert sockets[0].gettimeout() == 7.0
    assert sockets[1].gettimeout() is None


def test_not_one_byte_behind_the_handshake_is_taken(sockets):
    client, server = sockets

    def client_sends_at_once():
        authenticate_blocking_as_client(client, SECRET, ROUTER, kind=KIND, deadline_s=5.0)
        client.sendall(b"the first block")

    thread = threading.Thread(target=client_sends_at_once)
    thread.start()
    authenticate_blocking_as_server(server, SECRET, DECODE, kind=KIND, deadline_s=5.0)
    thread.join()
    server.settimeout(5.0)
    assert server.recv(100) == b"the first block"


def test_unix_sockets_will_do():
    client, server = socket.socketpair()
    with client, server:
        assert both(client, server) == [DECODE, ROUTER]


@pytest.mark.parametrize("wrong", [{"secret": b"the secret of another cluster"}, {"kind": CONTROL_KIND}])
def test_another_secret_or_kind_fails_on_both_sides_naming_the_address(sockets, wrong):
    client_address = "{}:{}".format(*sockets[0].getsockname())
    client_error, server_error = both(*sockets, wrong)
    assert type(client_error) is type(server_error) is AuthenticationFailed
    assert server_error.message.startswith(client_address)


@pytest.mark.parametrize("side", [0, 1])
def test_a_refusal_reaches_both_sides_as_the_same_error(sockets, side):
    def refuse(ours, theirs):
        raise LayoutMismatch(f"{ours.name} and {theirs.name} differ")

    options = [None, None]
    options[side] = {"check_peer": refuse}
    errors = both(*sockets, *options)
    assert [type(error) for error in errors] == [LayoutMismatch, LayoutMismatch]
    assert errors[0].message.split(": ")[1] == errors[1].message.split(": ")[1]


def test_a_mute_peer_is_an_error_naming_it_within_the_deadline(sockets):
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+: no handshake within 0.2 s"):
        authenticate_blocking_as_client(sockets[0], SECRET, ROUTER, kind=KIND, deadline_s=0.2)
    assert time.monotonic() - began_s < 2.0


def test_a_peer_that_trickles_does_not_stretch_the_deadline(sockets):
    client, server = sockets
    stop = threading.Event()

    def trickle():
        with contextlib.suppress(OSError):
            while not stop.wait(0.02):
                server.sendall(b"K")

    thread = threading.Thread(target=trickle)
    server.sendall(encode_frame(bytes(60_000))[:HEADER_BYTES])
    thread.start()
    try:
        began_s = time.monotonic()
        with pytest.raises(Unavailable, match="no handshake within"):
            authenticate_blocking_as_client(client, SECRET, ROUTER, kind=KIND, deadline_s=0.3)
        assert time.monotonic() - began_s < 2.0
    finally:
        stop.set()
        thread.join()


def test_a_peer_that_leaves_or_speaks_otherwise_is_an_error(sockets):
    client, server = sockets
    server.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ProtocolError, match="not a kvrelay peer"):
        authenticate_blocking_as_client(client, SECRET, ROUTER, kind=KIND, deadline_s=1.0)
    client.close()
    with pytest.raises(Unavailable, match=r"connection ended"):
        authenticate_blocking_as_server(server, SECRET, DECODE, kind=KIND, deadline_s=1.0)


def test_a_short_secret_is_refused(sockets):
    with pytest.raises(ConfigError):
        authenticate_blocking_as_client(sockets[0], b"short", ROUTER, kind=KIND, deadline_s=1.0)


async def test_it_is_the_same_handshake_as_that_of_control_connections():
    async with no_leaks() as peers:
        _, address = await peers.server(Handlers())

        def connect():
            with socket.create_connection(address) as sock:
                return authenticate_blocking_as_client(sock, SECRET, ROUTER, kind=CONTROL_KIND, deadline_s=5.0)

        assert await asyncio.to_thread(connect) == DECODE
