"""transfer: how fast the paths move KV blocks between two processes of this host.

Measured: from the call of a push until the last block is in its slot and its digest has been compared, in bytes a
second; over shared memory and over TCP, pushes of 16 blocks (a chunk of 256 tokens) and of 128 blocks.

Boundary: the sending half of a prefill worker's handoff and the receiving half of a decode worker's, without an
engine, router or ticket protocol around them. The sender's digests are made before: each block's is made once,
whoever it is sent to. Sender and receiver have a core each; both moments are of the clock that all processes of a host
share. What it is to be compared with is `bound_memcpy`: one copy of the same bytes.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict

import msgspec

from kv_transport import shm, tcp
from kv_transport.digest import block_digest
from kv_transport.interface import BlockSender
from kv_transport.shm_sender import ShmBlockSender
from kv_transport.tcp_sender import TcpBlockSender
from load_tests.child_process import ChildProcess, child_process
from load_tests.lab import Lab
from load_tests.machine_bounds import GIGA, measure_bounds
from load_tests.report import Check, judged
from load_tests.summary import median
from load_tests.transfer_messages import LAYOUT, Arrived, Begin, Offer, Opened, Started, identity_of
from pd_worker.memory import PoolMemory

NUM_BLOCKS = (16, 128)
NUM_TIMES = 5
"""Pushes in a row; a round's sample is their median's worth of bytes a second."""
PUSH_S = 10.0
PROGRAM = "load_tests.transfer_process"
ANSWER_S = 30.0


class TransferBench:
    name = "transfer"
    summary = "bytes a second of the paths that move KV"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        rates: defaultdict[str, list[float]] = defaultdict(list)
        async with child_process(PROGRAM, lab.cores[-1:]) as child:
            source = await TransferSource.start(child)
            try:
                for number in lab.rounds():
                    lab.progress(f"transfer round {number + 1} of {lab.num_rounds}")
                    for path in source.paths:
                        for num_blocks in NUM_BLOCKS:
                            rates[f"{path}_{num_blocks}_blocks"].append(await source.measure(path, num_blocks))
            finally:
                await source.close()
        return bounds + [judged(name, samples, "GB/s", "higher") for name, samples in rates.items()]


class TransferSource:
    """A pool with a sender for every path, and the process that receives."""

    def __init__(self, child: ChildProcess, begin: Begin) -> None:
        self._child = child
        self._memory = PoolMemory(begin.num_blocks, LAYOUT.block_bytes)
        self._memory.buffer[:] = secrets.token_bytes(LAYOUT.block_bytes) * begin.num_blocks
        self._digests = [block_digest(self._memory.block(block_id)) for block_id in range(begin.num_blocks)]
        identity, secret = identity_of("prefill", "bench-source"), begin.secret.encode()
        self._senders: dict[str, BlockSender] = {
            shm.PATH: ShmBlockSender(self._memory, identity, secret),
            tcp.PATH: TcpBlockSender(self._memory, identity, secret),
        }
        self._opened: msgspec.json.Decoder[Opened] = msgspec.json.Decoder(Opened)
        self._arrived: msgspec.json.Decoder[Arrived] = msgspec.json.Decoder(Arrived)

    @classmethod
    async def start(cls, child: ChildProcess) -> TransferSource:
        begin = Begin("bench-target", secrets.token_hex(32), max(NUM_BLOCKS))
        await child.tell(begin)
        await child.hear(msgspec.json.Decoder(Started), ANSWER_S)
        source = cls(child, begin)
        for path in source.paths:  # connections
            await source.measure(path, 1)
        return source

    @property
    def paths(self) -> list[str]:
        return list(self._senders)

    async def measure(self, path: str, num_blocks: int) -> float:
        """GB a second, the median of NUM_TIMES pushes. Raises TransferError, EngineError, DeadlineExceeded."""
        took_s = [await self._push(path, num_blocks) for _ in range(NUM_TIMES)]
        return num_blocks * LAYOUT.block_bytes / median(took_s) / GIGA

    async def close(self) -> None:
        for sender in self._senders.values():
            await sender.close()
        self._memory.close()

    async def _push(self, path: str, num_blocks: int) -> float:
        await self._child.tell(Offer(path, num_blocks))
        ticket = (await self._child.hear(self._opened, ANSWER_S)).ticket
        indices = list(range(num_blocks))
        began_s = time.monotonic()
        await self._senders[path].push(ticket, indices, indices, self._digests[:num_blocks], PUSH_S)
        return (await self._child.hear(self._arrived, ANSWER_S)).at_s - began_s
