"""Known fault 10, without other hosts: the handshake with a peer that accepts and stays silent has no deadline.

Right: an error within the handshake's deadline that names the peer, over every path, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from known_ucx import known_ucx
from transport_parts import LAYOUT, SECRET, Pair, SharedMemory, identity
from worker_rig import HANDOFF_PATHS, check_stream, make_request, small_config, workers

from kv_transport.paths import make_receiver, make_sender
from pd_core.config import TransferConfig
from pd_core.errors import TransferError
from pd_core.ticket import TransportAddress

SOCKET_PATHS = [path for path in HANDOFF_PATHS if path != "inproc"]
DEADLINE_S = 5.0
SLACK_S = 1.5


@contextlib.contextmanager
def mute_listener(path: str) -> Iterator[TransportAddress]:
    if path == "shm":
        name = f"mute-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen()
            yield TransportAddress(path, f"@{name}", 0)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield TransportAddress(path, *listener.getsockname())


@pytest.mark.parametrize("path", SOCKET_PATHS)
async def test_a_mute_receiver_costs_its_own_push_the_deadline_and_nobody_else_anything(path: Any) -> None:
    transfer = TransferConfig(path=path)
    source, target = SharedMemory(4, LAYOUT.block_bytes), SharedMemory(4, LAYOUT.block_bytes)
    with known_ucx():
        receiver = make_receiver(target, identity("decode"), SECRET, transfer)
        sender = make_sender(source, identity("prefill"), SECRET, transfer)
    await receiver.start()
    pair = Pair(source, target, receiver, sender)
    try:
        with mute_listener(path) as address:
            elsewhere = msgspec.structs.replace(pair.ticket([0, 1]), addresses=[address])
            # Another boot, so that what is known of the one says nothing of the other.
            elsewhere = msgspec.structs.replace(
                elsewhere, ref=msgspec.structs.replace(elsewhere.ref, incarnation="mute")
            )
            began_s = time.monotonic()
            waiting = asyncio.ensure_future(pair.push(elsewhere, [0, 1], [0, 1], deadline_s=30.0))
            while not waiting.done():
                ticket, arrivals = pair.open([0, 1])
                pushed_s = time.monotonic()
                await pair.push(ticket, [0, 1], [2, 3])
                await arrivals.until(lambda a: a.verified == {0, 1})
                assert time.monotonic() - pushed_s < SLACK_S
                await receiver.close_ticket(ticket.ref)
                await asyncio.sleep(0.2)
            assert time.monotonic() - began_s < DEADLINE_S + SLACK_S
            with pytest.raises(TransferError, match=address.host if path == "shm" else f"127.0.0.1:{address.port}"):
                await waiting
    finally:
        await sender.close()
        await receiver.close()
        source.close()
        target.close()


@pytest.mark.parametrize("path", [path for path in SOCKET_PATHS if path != "shm"])
async def test_workers_on_ipv6_hand_over(path: str) -> None:
    config = small_config()
    config = msgspec.structs.replace(config, transfer=msgspec.structs.replace(config.transfer, host="::1"))
    async with workers(path, config) as rig:
        assert rig.decode_end.host == "::1"
        run = rig.run(make_request("six", 100, 5))
        await run.tokens()
        check_stream(run)
        assert run.ticket is not None
        assert [address.host for address in run.ticket.addresses] == ["::1"]
