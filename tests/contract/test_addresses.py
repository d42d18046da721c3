"""Where workers listen and what they tell others: one address, v4 or v6; one that does not answer delays nobody.

Known fault 10 as far as one host can show it; tests/hosts has it between hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from leaks import no_leaks
from rpc_peers import REPLIES, ROUTER, Echo, Handlers
from rpc_peers import SECRET as RPC_SECRET
from rpc_peers import no_leaks as rpc_no_leaks
from tls_authority import Authority
from transport_parts import SECRET as KV_SECRET
from transport_parts import ByteMemory, identity
from transport_paths import tcp_pair
from worker_rig import SECRET, Rig, check_stream, make_request

from decode_worker.actor import DecodeActor
from kv_transport.tcp_receiver import TcpBlockReceiver
from pd_core.config import (
    Config,
    DecodeConfig,
    FakeEngineConfig,
    ModelConfig,
    PrefillConfig,
    TlsConfig,
    TransferConfig,
)
from pd_core.errors import ConfigError, Unavailable
from pd_core.messages import WORKER_REPLIES
from pd_rpc.client import RpcClient
from pd_rpc.tls import load_tls
from pd_worker.worker_actor import WorkerActor
from prefill_worker.actor import PrefillActor

SIX = "only-six.test"
EVERYWHERE = "everywhere.test"
ALL_V4 = "0.0.0.0"  # noqa: S104 - refused, or not advertised
PROMPT_TOKENS = 3 * 32 + 5


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SIX` has an AAAA record and no other; `EVERYWHERE` stands for what cannot be told."""
    real = socket.getaddrinfo
    known = {SIX: "::1", EVERYWHERE: ALL_V4}

    def getaddrinfo(host, *args, **kwargs):
        return real(known.get(host, host), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_a_name_with_only_a_v6_address_serves_calls_and_blocks(names):
    async with rpc_no_leaks() as peers:
        _, address = await peers.server(Handlers(), host=SIX)
        assert address[0] == "::1"
        client = await peers.client((SIX, address[1]))
        assert await client.call(Echo("x"), 1.0) == Echo("x")
    async with tcp_pair(2, host=SIX) as pair:
        ticket, arrivals = pair.open([0])
        assert ticket.addresses[0].host == "::1"
        named = [msgspec.structs.replace(ticket.addresses[0], host=SIX)]
        await pair.push(msgspec.structs.replace(ticket, addresses=named), [0], [1])
        await arrivals.until(lambda a: a.verified == {0})


async def test_errors_about_v6_addresses_have_brackets():
    async with rpc_no_leaks() as peers:
        server, (host, port) = await peers.server(Handlers(), host="::1")
        await server.close()
        with pytest.raises(Unavailable, match=rf"^\[::1\]:{port}: "):
            await peers.client((host, port))


async def test_a_control_listener_is_on_its_own_address_alone():
    async with rpc_no_leaks() as peers:
        _, (host, port) = await peers.server(Handlers(), host="127.0.0.2")
        assert host == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


async def test_an_address_that_stands_for_all_is_never_told_to_writers(names):
    for host in (ALL_V4, "::", EVERYWHERE):
        receiver = TcpBlockReceiver(ByteMemory(1), identity("decode"), KV_SECRET, host=host)
        with pytest.raises(ConfigError) as caught:
            await receiver.start()
        assert caught.value.param == "transfer.host"
        await receiver.close()


async def test_one_that_is_told_another_address_may_listen_on_all():
    receiver = TcpBlockReceiver(ByteMemory(1), identity("decode"), KV_SECRET, host=ALL_V4, advertise_host="127.0.0.1")
    await receiver.start()
    assert receiver.addresses[0].host == "127.0.0.1"
    await receiver.close()


async def test_a_mute_control_peer_is_an_error_in_time_and_others_are_not_delayed():
    async with rpc_no_leaks() as peers:
        _, address = await peers.server(Handlers())
        with socket.create_server(("127.0.0.1", 0)) as mute:
            port = mute.getsockname()[1]
            began_s = time.monotonic()
            stuck = asyncio.ensure_future(peers.client(("127.0.0.1", port), deadline_s=0.5))
            client = await peers.client(address)
            assert await client.call(Echo("x"), 1.0) == Echo("x")
            assert not stuck.done()
            with pytest.raises(Unavailable, match=f"127.0.0.1:{port}: no handshake within 0.5 s"):
                await stuck
            assert time.monotonic() - began_s < 1.5


async def test_an_address_where_somebody_else_answers_is_an_error_that_names_it():
    """As 127.0.0.1 of another host would be."""
    async with rpc_no_leaks() as peers:
        _, (host, port) = await peers.server(Handlers())
        with pytest.raises(Unavailable, match=f"{host}:{port}"):
            await RpcClient.connect(
                host,
                port,
                identity=ROUTER,
                secret=RPC_SECRET,
                replies=REPLIES,
                check_peer=_not_the_boot_that_was_meant,
            )


def _not_the_boot_that_was_meant(_ours, theirs) -> None:
    raise Unavailable(f"another boot answers: {theirs}")


def worker_config(host: str, tls: TlsConfig | None, connections: int | None) -> Config:
    return Config(
        model=ModelConfig(path="fake", fake=FakeEngineConfig(context_tokens=256)),
        prefill=PrefillConfig(num_blocks=32, chunk_tokens=32),
        decode=DecodeConfig(num_blocks=32),
        transfer=TransferConfig(host=host, path="tcp", lease_s=1.0, push_timeout_s=2.0, tcp_connections=connections),
        tls=tls,
    )


@contextlib.asynccontextmanager
async def actors(config: Config, tmp_path: Path) -> AsyncIterator[Rig]:
    prefill = PrefillActor("prefill-0", "p-boot", SECRET, config, [], str(tmp_path), None)
    decode = DecodeActor("decode-0", "d-boot", SECRET, config, [], str(tmp_path), None)
    tls = load_tls(config.tls)
    async with no_leaks():
        ends = [await prefill.start(), await decode.start()]
        clients = [
            await RpcClient.connect(end.host, end.port, identity=ROUTER, secret=SECRET, replies=WORKER_REPLIES, tls=tls)
            for end in ends
        ]
        yield Rig(prefill._worker, decode._worker, *ends, *clients)  # type: ignore[arg-type]
        for client in clients:
            await client.close()
        await prefill.stop(1.0)
        await decode.stop(1.0)


def no_tls(_: Path) -> None:
    return None


def with_tls(folder: Path) -> TlsConfig:
    return Authority(folder).issue()


@pytest.mark.parametrize("make_tls", [no_tls, with_tls])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", SIX])
async def test_a_handoff_goes_by_the_address_of_the_config(
    names: None, make_tls: Callable[[Path], TlsConfig | None], host: str, tmp_path: Path
) -> None:
    numeric = host if host != SIX else "::1"
    async with actors(worker_config(host, make_tls(tmp_path), 2), tmp_path) as rig:
        assert (rig.prefill_end.host, rig.decode_end.host) == (numeric, numeric)
        run = rig.run(make_request("r1", PROMPT_TOKENS, 5))
        await run.tokens()
        check_stream(run)
        assert run.ticket is not None
        assert {run.ticket.control_host} | {address.host for address in run.ticket.addresses} == {numeric}
        assert run.committed is not None and run.committed.path == "tcp"


@pytest.mark.parametrize("actor", [PrefillActor, DecodeActor])
async def test_workers_do_not_start_where_the_config_names_an_address_for_all(
    actor: type[WorkerActor], names: None, tmp_path: Path
) -> None:
    worker = actor("worker-0", "boot", SECRET, worker_config(EVERYWHERE, None, None), [], str(tmp_path), None)
    with pytest.raises(ConfigError) as caught:
        await worker.start()
    assert caught.value.param == "transfer.host"
    await worker.stop(1.0)
