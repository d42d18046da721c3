"""Control connections under TLS: as without, and nobody gets in who should not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import msgspec
import pytest
from rpc_peers import DECODE, QUICK, ROUTER, Count, Echo, Fail, Handlers, Hang, no_leaks
from tls_authority import DAY, Authority, unchecked
from waiting import until

from pd_core.errors import AuthenticationFailed, Overloaded, ProtocolError, Unavailable, WorkerLost
from pd_rpc.limits import RpcLimits
from pd_rpc.tls import Tls, load_tls
from pd_rpc.tls_protocol import TlsProtocol


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    loaded = load_tls(authority.issue())
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return unchecked(Authority(tmp_path_factory.mktemp("strange"), "strange").issue())


async def test_calls_and_streams_work_as_they_do_without(tls):
    handlers = Handlers()
    async with no_leaks() as peers:
        _, address = await peers.server(handlers, tls=tls)
        client = await peers.client(address, tls=tls)
        assert client.peer == DECODE
        assert handlers.contexts == []
        assert await client.call(Echo("ä" * 300_000), 5.0) == Echo("ä" * 300_000)
        assert handlers.contexts[0].peer == ROUTER
        async with client.stream(Count(500, item_bytes=5000), 10.0) as items:
            assert [item.index async for item in items] == list(range(500))
        with pytest.raises(Overloaded, match="no blocks left"):
            async with client.stream(Fail("overloaded"), 5.0) as items:
                async for _ in items:
                    pass


async def test_a_reader_that_does_not_read_holds_the_writer_up(tls):
    handlers = Handlers()
    async with no_leaks() as peers:
        _, address = await peers.server(handlers, tls=tls)
        client = await peers.client(address, tls=tls)
        async with client.stream(Count(1000, item_bytes=100_000), 20.0) as items:
            await anext(items)
            await asyncio.sleep(0.3)
            assert handlers.num_made < 200
            assert len([None async for _ in items]) == 999


async def test_a_connection_that_is_cut_fails_its_calls_at_once(tls):
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls)
        client = await peers.client(address, tls=tls)
        call = asyncio.ensure_future(client.call(Hang(), 30.0))
        await until(lambda: server.num_calls == 1)
        (connection,) = server._connections
        connection.link.abort()
        with pytest.raises(WorkerLost):
            await call


async def test_a_server_that_shuts_down_is_heard_saying_so(tls):
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls)
        client = await peers.client(address, tls=tls)
        await server.close()
        error = await client.wait_closed()
        assert error is not None and "is shutting down" in error.message


async def test_a_server_that_is_full_says_so_before_the_handshake_is_over(tls):
    limits = RpcLimits(max_unauthenticated=1)
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls, limits=limits)
        with socket.create_connection(address):
            await until(lambda: len(server._connections) == 1)
            with pytest.raises(Overloaded, match=f"127.0.0.1:{address[1]}.*in their handshake"):
                await peers.client(address, tls=tls)


async def refusal_of(peers, address, kind, client_tls, within_s=1.0):
    """What the client was refused with: of this kind, in time, naming host and port."""
    began_s = time.monotonic()
    with pytest.raises(kind) as caught:
        await peers.client(address, tls=client_tls)
    assert time.monotonic() - began_s < within_s
    assert caught.value.message.startswith(f"127.0.0.1:{address[1]}: ")
    return caught.value.message


async def test_a_peer_without_tls_and_one_with_it_tell_each_other(tls, caplog):
    async with no_leaks() as peers:
        _, with_tls = await peers.server(Handlers(), tls=tls)
        assert "speaks TLS" in await refusal_of(peers, with_tls, ProtocolError, None)
        _, without = await peers.server(Handlers())
        assert "does not speak TLS" in await refusal_of(peers, without, ProtocolError, tls)
        await until(lambda: "it does not speak TLS" in caplog.text)  # the server's own log


async def test_an_unknown_authority_is_refused_by_both(tls, strange, caplog):
    async with no_leaks() as peers:
        _, address = await peers.server(Handlers(), tls=tls)
        assert "its certificate is not accepted" in await refusal_of(peers, address, AuthenticationFailed, strange)
        await until(lambda: "it does not accept our certificate: unknown ca" in caplog.text)


async def test_a_client_that_only_the_server_does_not_accept_hears_why(tls, authority, strange, tmp_path):
    other = Authority(tmp_path, "other")
    half = unchecked(msgspec.structs.replace(other.issue(), authority=str(authority.path)))
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls)
        message = await refusal_of(peers, address, AuthenticationFailed, half)
        assert "it does not accept our certificate: unknown ca" in message
        await until(lambda: not server._connections)


async def test_an_expired_certificate_is_refused_by_name_on_either_side(tls, authority):
    old = unchecked(authority.issue(left=-DAY))
    async with no_leaks() as peers:
        _, address = await peers.server(Handlers(), tls=tls)
        assert "certificate expired" in await refusal_of(peers, address, AuthenticationFailed, old)
        _, address = await peers.server(Handlers(), tls=old)
        assert "certificate has expired" in await refusal_of(peers, address, AuthenticationFailed, tls)


async def test_the_clusters_secret_is_asked_for_under_tls_too(tls):
    async with no_leaks() as peers:
        _, address = await peers.server(Handlers(), tls=tls)
        with pytest.raises(AuthenticationFailed, match="secret"):
            await peers.client(address, tls=tls, secret=b"another secret of 32 bytes .....")


async def test_a_mute_server_is_an_error_within_the_deadline_naming_host_and_port(tls):
    async with no_leaks() as peers:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            with pytest.raises(Unavailable, match=rf"127.0.0.1:{address[1]}: no handshake within 0.3 s"):
                await peers.client(address, tls=tls, deadline_s=0.3)


async def test_mute_and_senseless_clients_are_dropped_in_time_and_delay_nobody(tls):
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls, limits=QUICK)
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(8)]
            for number, stranger in enumerate(strangers[2:]):
                stranger.send([b"\x16\x03\x01", b"\x16" * 500, b"GET / HTTP/1.1\r\n\r\n"][number % 3])
            client = await peers.client(address, tls=tls, limits=QUICK)
            assert await client.call(Echo("x"), 1.0) == Echo("x")
            await until(lambda: len(server._connections) == 1, within_s=2.0)


async def test_who_speaks_no_tls_and_stays_is_cut_off_soon(tls):
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls)
        with socket.create_connection(address) as stranger:
            stranger.send(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: server._connections)
            await until(lambda: not server._connections, within_s=2.0)  # the whole handshake has 5 s


async def test_handshakes_that_failed_leave_room_for_those_that_do_not(tls, strange):
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls)
        for _ in range(3):
            results = await asyncio.gather(
                *(peers.client(address, tls=strange) for _ in range(12)), return_exceptions=True
            )
            assert all(isinstance(result, AuthenticationFailed) for result in results)
        await until(lambda: not server._connections)
        assert (await peers.client(address, tls=tls)).peer == DECODE


async def test_nothing_of_ours_can_be_read_on_the_network(tls):
    """A tap between the two sees neither names nor bodies."""
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async with no_leaks() as peers:
        _, address = await peers.server(Handlers(), tls=tls)

        async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(*address)
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

        async with await asyncio.start_server(tap, "127.0.0.1", 0) as tapped:
            client = await peers.client(tapped.sockets[0].getsockname(), tls=tls)
            assert await client.call(Echo("a word that nobody else should hear"), 1.0)
            await client.close()
    assert len(seen) > 1000
    assert not any(word in seen for word in (b"nobody else", b"KVRP", ROUTER.name.encode(), DECODE.name.encode()))


async def test_what_fails_in_mid_connection_is_told_and_ends_it(tls):
    """A record that was changed on its way."""
    async with no_leaks() as peers:
        server, address = await peers.server(Handlers(), tls=tls)
        client = await peers.client(address, tls=tls)
        protocol = client._link._transport._protocol
        assert isinstance(protocol, TlsProtocol)
        protocol._transport.write(b"\x17\x03\x03\x00\x20" + bytes(32))
        error = await client.wait_closed()
        assert error is not None and "bad record mac" in error.message
        await until(lambda: not server._connections)
