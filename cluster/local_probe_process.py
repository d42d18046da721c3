"""The receiving half of `kvrelay doctor`'s probe of this host: `python -m cluster.local_probe_process CORES`.

It reads one line, says where it listens, answers probes, and ends with its input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import BinaryIO

import msgspec

from decode_worker.handoff_calls import HandoffCalls
from kv_transport.paths import make_receiver
from pd_core.config import TransferConfig
from pd_core.layout import BlockLayout, Fingerprint
from pd_core.ledger import BlockLedger
from pd_core.messages import WorkerEndpoint
from pd_rpc.server import RpcServer
from pd_rpc.wire import PeerIdentity
from pd_worker.counters import Counters
from pd_worker.incoming import IncomingHandoffs
from pd_worker.memory import PoolMemory
from pd_worker.open_requests import OpenRequests
from pd_worker.probe_target import ProbeTarget

LAYOUT = BlockLayout("probe", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
"""Blocks of the default model's size: 360 KiB."""
FINGERPRINT = Fingerprint("none", "none", "none", "none", LAYOUT)


class Begin(msgspec.Struct, frozen=True):
    """secret: for these two processes alone; paths are those of `transfer`"""

    secret: str
    incarnation: str
    num_blocks: int
    transfer: TransferConfig


async def serve(lines: BinaryIO, output: BinaryIO) -> None:
    """Answers one prober until the input ends."""
    begin = msgspec.json.decode(await asyncio.to_thread(lines.readline), type=Begin)
    identity = PeerIdentity("second process", "decode", begin.incarnation, FINGERPRINT)
    secret = begin.secret.encode()
    memory = PoolMemory(begin.num_blocks, LAYOUT.block_bytes)
    receiver = make_receiver(memory, identity, secret, begin.transfer)
    ledger, broken = BlockLedger(begin.num_blocks, begin.incarnation), asyncio.Event()
    handoffs = IncomingHandoffs(
        ledger,
        receiver,
        LAYOUT.block_bytes,
        begin.transfer.lease_s,
        begin.transfer.digests,
        Counters(),
        lambda _: broken.set(),
    )
    target = ProbeTarget(
        ledger,
        handoffs,
        OpenRequests(),
        num_spare=lambda: ledger.num_free,
        check_open=lambda: None,
        on_room=lambda: None,
    )
    calls = HandoffCalls(handoffs.find, lambda request_id, attempt: None, vocab_size=1)
    server = RpcServer(identity, secret, {**calls.handlers, **target.handlers})
    await receiver.start()
    try:
        host, port = await server.start(begin.transfer.host, 0)
        handoffs.control_host, handoffs.control_port = host, port
        endpoint = WorkerEndpoint(identity.name, identity.role, host, port, identity.incarnation, os.getpid())
        output.write(msgspec.json.encode(endpoint) + b"\n")
        output.flush()
        await _until_input_ends(lines, broken)
    finally:
        await server.close()
        await handoffs.close()
        await receiver.close()
        memory.close()


async def _until_input_ends(lines: BinaryIO, broken: asyncio.Event) -> None:
    ended, failed = asyncio.ensure_future(asyncio.to_thread(lines.readline)), asyncio.ensure_future(broken.wait())
    try:
        await asyncio.wait({ended, failed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        failed.cancel()


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    asyncio.run(serve(sys.stdin.buffer, sys.stdout.buffer))


if __name__ == "__main__":
    main()
