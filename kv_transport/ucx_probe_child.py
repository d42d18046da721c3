"""One side of a probe of UCX, in a process of its own: `python -m kv_transport.ucx_probe_child HOST receive`.

The receiver starts the sender, tells it where to write, and puts what it measures into a report; see ucx_probe. What
goes wrong is said on the last line of stderr, with exit status 1.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from kv_transport.interface import BlockSender
from kv_transport.receiver import PoolReceiver
from kv_transport.tcp_receiver import TcpListener
from kv_transport.tcp_sender import TcpBlockSender
from kv_transport.ucx_library import load_ucx, loaded_from
from kv_transport.ucx_offer import UcxReport
from kv_transport.ucx_receiver import UcxListener
from kv_transport.ucx_sender import UcxBlockSender
from kv_transport.ucx_settings import ucx_settings
from pd_core.errors import KvrelayError, TransferError
from pd_core.layout import BlockLayout, Fingerprint
from pd_core.ticket import Ticket, TicketRef
from pd_rpc.wire import PeerIdentity

NUM_BLOCKS = 24
NUM_ROUNDS = 8
NUM_ECHOES = 20
PUSH_S = 10.0
_LARGE = BlockLayout("probe", num_layers=30, num_kv_heads=3, head_dim=128, dtype="uint8")
_SMALL = BlockLayout("probe", num_layers=1, num_kv_heads=1, head_dim=128, dtype="uint8")
_TRANSPORT = re.compile(r"resource\s+\d+\s*:.*--\s*(\S+)")


class Targets(msgspec.Struct, frozen=True):
    """What the sender is told: the cluster's secret for this probe, and a ticket for each pool."""

    secret: str
    large: Ticket
    small: Ticket


class Rates(msgspec.Struct, frozen=True):
    """What the sender measured; see UcxReport."""

    gb_per_s: float
    tcp_gb_per_s: float
    latency_s: float


class Blocks:
    """BlockMemory of this process."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.buffer = memoryview(bytearray(num_blocks * block_bytes))

    def block(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        return self.buffer[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]


def _identity(role: str, layout: BlockLayout) -> PeerIdentity:
    return PeerIdentity(f"probe-{role}", role, "probe", Fingerprint("probe", "probe", "probe", "probe", layout))


async def receive(host: str) -> UcxReport:
    """Raises KvrelayError."""
    command = [sys.executable, "-m", "kv_transport.ucx_probe_child", host, "send"]
    pipe = subprocess.PIPE
    sender = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    secret = secrets.token_hex(32)
    pools: list[PoolReceiver] = []
    try:
        large = await _open_pool(host, secret, _LARGE, NUM_BLOCKS, pools)
        small = await _open_pool(host, secret, _SMALL, 1, pools)
        said, complained = await sender.communicate(msgspec.json.encode(Targets(secret, large, small)))
    finally:
        if sender.returncode is None:
            sender.kill()
        code = await sender.wait()
        for pool in pools:
            await pool.close()
    if code < 0:
        raise TransferError(f"the sending process crashed with {signal.Signals(-code).name}")
    if code > 0:
        lines = complained.decode(errors="replace").strip().splitlines()
        raise TransferError(lines[-1] if lines else f"the sending process ended with status {code}")
    return _report(host, msgspec.json.decode(said.splitlines()[-1], type=Rates))


async def _open_pool(host: str, secret: str, layout: BlockLayout, num_blocks: int, pools: list[PoolReceiver]) -> Ticket:
    """Adds it to `pools`; a ticket for all of it."""
    memory, identity, key = Blocks(num_blocks, layout.block_bytes), _identity("receiver", layout), secret.encode()
    receiver = PoolReceiver(
        memory, [UcxListener(memory, identity, key, host=host), TcpListener(memory, identity, key, host=host)]
    )
    pools.append(receiver)
    await receiver.start()
    ref = TicketRef("probe", "probe", 1, 0)
    ticket = Ticket(ref, "probe", 0, list(range(num_blocks)), PUSH_S, host, 0, receiver.addresses)
    receiver.open_ticket(ticket, lambda _: None)
    return ticket


async def send(host: str, targets: Targets) -> Rates:
    """Raises KvrelayError."""
    places, key = list(range(NUM_BLOCKS)), targets.secret.encode()
    large, small = Blocks(NUM_BLOCKS, _LARGE.block_bytes), Blocks(1, _SMALL.block_bytes)
    senders: list[BlockSender] = [
        UcxBlockSender(large, _identity("sender", _LARGE), key, host=host),
        TcpBlockSender(large, _identity("sender", _LARGE), key, connections=1),
    ]
    echoes = UcxBlockSender(small, _identity("sender", _SMALL), key, host=host)
    try:
        seconds: list[list[float]] = [[], []]
        for _ in range(NUM_ROUNDS):
            for sender, times in zip(senders, seconds, strict=True):
                times.append(await _push(sender, targets.large, places))
        latencies = [await _push(echoes, targets.small, [0]) for _ in range(NUM_ECHOES)]
    finally:
        for sender in (*senders, echoes):
            await sender.close()
    num_bytes = NUM_BLOCKS * _LARGE.block_bytes
    rates = [num_bytes / 1e9 / statistics.median(times[1:]) for times in seconds]  # the first one connects
    return Rates(rates[0], rates[1], min(latencies))


async def _push(sender: BlockSender, ticket: Ticket, places: Sequence[int]) -> float:
    """Seconds. No digest is right, so that every round writes the same slots again."""
    began_s = time.monotonic()
    await sender.push(ticket, places, places, [1] * len(places), PUSH_S)
    return time.monotonic() - began_s


def _report(host: str, rates: Rates) -> UcxReport:
    library = load_ucx()
    context, _ = library.make_worker(ucx_settings(host))
    transports = list(dict.fromkeys(_TRANSPORT.findall(context.info)))
    file = loaded_from()
    return UcxReport(
        version=library.version,
        library="wheel" if "site-packages" in file else "system",
        library_file=file,
        transports=transports,
        has_cuda=bool(context.cuda_support),
        gb_per_s=rates.gb_per_s,
        tcp_gb_per_s=rates.tcp_gb_per_s,
        latency_s=rates.latency_s,
    )


def main(host: str, role: str) -> int:
    """Exit status."""
    try:
        if role == "receive":
            said = msgspec.json.encode(asyncio.run(receive(host)))
        else:
            said = msgspec.json.encode(
                asyncio.run(send(host, msgspec.json.decode(sys.stdin.buffer.read(), type=Targets)))
            )
    except KvrelayError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(said.decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
